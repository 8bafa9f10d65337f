"""Laws of the memory model on real architectures (memory-model D1, D3, D4, D5)."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.memory.scratch_sizes.matmul import cublas_workspace_is_persistent
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.traces.session import TraceSession
from budgetfit.tracing.cuda.target import installed_torch_version
from budgetfit.workload.workload import Workload
from tests import models
from tests.models import EXAMPLES, MIB
from tests.traced import ADA, PAIRS, chains, line, session

BATCH = 64
BATCHES = (1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32, 64, 100)
ROUNDING = 1024  # two blocks of 512: the state of the random generators


def peak(traces: TraceSession, recipe: Recipe) -> int:
    trace = traces.exact(recipe)
    gpu = traces.workload.gpu
    return replay(
        trace, recipe.batch_size, gpu, limit_bytes=UNLIMITED_BYTES
    ).allocated_bytes


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "convolutions"])
def test_recomputing_one_more_block_never_raises_the_peak(name: str) -> None:
    chain = chains(name, *PAIRS[name])
    blocks = chain.traces.workload.blocks
    peaks = [
        peak(
            chain.traces,
            chain.settings.recipe(BATCH, checkpoint_every_block(blocks[:count])),
        )
        for count in range(len(blocks) + 1)
    ]
    assert all(more <= less + ROUNDING for less, more in pairwise(peaks)), peaks
    assert peaks[-1] < peaks[0]


def test_a_recomputed_block_at_the_peak_may_hold_its_wide_input_besides() -> None:
    # Under autocast, blocks that end in a layer norm hand fp32 on and save bf16. The
    # last one's backward is the peak: recomputed, it has all that again and its input.
    chain = chains("bert", *PAIRS["bert"])
    blocks = chain.traces.workload.blocks
    before, after = (
        peak(chain.traces, chain.settings.recipe(BATCH, checkpoint_every_block(part)))
        for part in (blocks[:-1], blocks)
    )
    hidden = BATCH * 16 * 32 * 4
    assert after - before <= hidden + ROUNDING
    persistent = cublas_workspace_is_persistent(installed_torch_version())
    if persistent:  # else a product may be the peak
        assert before < after


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_a_larger_batch_never_has_a_lower_peak(name: str, recompute: bool) -> None:
    gpu, precision = PAIRS[name]
    trace = line(name, gpu, precision, recompute=recompute)
    for expandable in (False, True):
        peaks = [
            replay(
                trace,
                batch_size,
                find_gpu(gpu),
                limit_bytes=UNLIMITED_BYTES,
                settings=AllocatorSettings(expandable_segments=expandable),
            ).allocated_bytes
            for batch_size in BATCHES
        ]
        assert peaks == sorted(peaks)
        assert peaks[0] < peaks[-1]


def llama_peak(samples: int, length: int) -> int:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = models.llama(hidden_size=128, intermediate_size=256, vocab_size=128)
    ids = torch.zeros(2, length, dtype=torch.long)
    workload = Workload(
        model=model, batch={"input_ids": ids, "labels": ids}, gpu=find_gpu(ADA)
    )
    return peak(
        TraceSession(workload), Recipe(batch_size=samples, precision="bf16-mixed")
    )


def test_the_same_tokens_cost_the_same_however_they_are_cut_into_samples() -> None:
    # Flash attention keeps no scores of length by length.
    long, short = llama_peak(8, 4096), llama_peak(16, 2048)
    assert long == pytest.approx(short, rel=0.005)


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [("adamw_torch_fused", 2), ("adamw_torch", 2), ("sgd", 0), ("rmsprop", 1)],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_gradients_and_states_are_never_more_than_the_peak(
    optimizer: str, states: int, accumulation: int
) -> None:
    recipe = Recipe(
        batch_size=1, optimizer=optimizer, gradient_accumulation_steps=accumulation
    )
    traces = session("mebi")
    weights = sum(p.numel() for p in EXAMPLES["mebi"].model().parameters()) * 4
    assert weights == 3 * MIB
    timeline = replay(traces.affine(recipe), 1, traces.workload.gpu)
    assert timeline.allocated_bytes >= (1 + 1 + states) * weights
    # In the optimizer's step they are all there.
    assert timeline.phase_peaks_bytes["optimizer"] >= (1 + 1 + states) * weights


def test_accumulated_gradients_live_during_the_forward_of_the_next_micro_batch() -> (
    None
):
    one, two = (
        replay(
            session("mebi").affine(
                Recipe(batch_size=1, gradient_accumulation_steps=steps)
            ),
            1,
            find_gpu(ADA),
        )
        for steps in (1, 2)
    )
    more = two.phase_peaks_bytes["forward"] - one.phase_peaks_bytes["forward"]
    assert more == 3 * MIB


def test_every_byte_at_the_peak_has_a_category() -> None:
    gpu, precision = PAIRS["gpt2"]
    trace = line("gpt2", gpu, precision)
    timeline = replay(trace, 8, find_gpu(gpu))
    assert sum(timeline.at_peak_bytes.values()) == timeline.allocated_bytes
    assert set(timeline.at_peak_bytes) == set(CATEGORIES)
    weights = sum(p.numel() for p in EXAMPLES["gpt2"].model().parameters()) * 4
    assert timeline.at_peak_bytes["parameters"] >= weights
    assert timeline.at_peak_bytes["optimizer_state"] >= 2 * weights


def test_a_card_changes_what_its_kernels_take_and_nothing_else() -> None:
    gpu, precision = PAIRS["llama"]
    trace = line("llama", gpu, precision)
    ada = find_gpu(gpu)
    more_processors = replace(ada, sm_count=2 * ada.sm_count)
    peaks = [
        replay(trace, 64, card, limit_bytes=UNLIMITED_BYTES).at_peak_bytes
        for card in (ada, more_processors)
    ]
    for category in ("parameters", "optimizer_state", "batch", "buffers"):
        assert peaks[0][category] == peaks[1][category]
