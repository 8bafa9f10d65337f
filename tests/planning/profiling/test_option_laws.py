"""The laws of the memory model under every way to treat a block (D1, D3, D5, D7)."""

from itertools import pairwise

import pytest
import torch
from pydantic import TypeAdapter

from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests import models
from tests.traced import ADA

LAYERS, BATCH = 6, 16
MODES = ("recompute", "selective", "offload", "input on the host", "nested")
BATCHES = (2, 3, 4, 7, 8, 16, 33, 64)
ROUNDING = 1024


@pytest.fixture(scope="module")
def chain() -> BlockChain:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 512}
    with torch.device("meta"):
        model = models.llama(num_hidden_layers=LAYERS, **sizes)
    ids = torch.zeros(2, 256, dtype=torch.int64)
    workload = Workload(
        model=model, batch={"input_ids": ids, "labels": ids}, gpu=find_gpu(ADA)
    )
    return BlockChain(
        TraceSession(workload.with_found_blocks()),
        TrainingSettings(precision="bf16", optimizer="adamw_torch_fused"),
    )


def treated(chain: BlockChain, mode: str, count: int) -> tuple[Segment, ...]:
    """Treat the first ``count`` blocks."""
    names = chain.traces.workload.blocks[:count]
    if mode == "nested":
        return (Segment(names, nested=True),) if count > 1 else ()
    if mode == "input on the host":
        return tuple(Segment((name,), input_on_host=True) for name in names)
    if mode == "selective":
        options = chain.profile_at(BATCH).blocks[3].options
        saved = next(o.saved_ops for o in options if o.mode == "selective")
        return tuple(Segment((name,), "selective", saved_ops=saved) for name in names)
    if mode == "offload":
        return tuple(Segment((name,), "offload") for name in names)
    return tuple(Segment((name,)) for name in names)


def peak(chain: BlockChain, segments: tuple[Segment, ...], batch_size: int) -> int:
    trace = chain.traces.affine(chain.settings.recipe(batch_size, segments))
    gpu = chain.traces.workload.gpu
    line = replay(trace, batch_size, gpu, limit_bytes=UNLIMITED_BYTES)
    return line.allocated_bytes


@pytest.mark.parametrize("mode", MODES)
def test_treating_one_more_block_never_raises_the_peak(
    chain: BlockChain, mode: str
) -> None:
    peaks = [
        peak(chain, treated(chain, mode, count), BATCH) for count in range(LAYERS + 1)
    ]
    assert all(more <= less + ROUNDING for less, more in pairwise(peaks)), peaks
    assert peaks[-1] < peaks[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_larger_batch_never_needs_less(chain: BlockChain, mode: str) -> None:
    segments = treated(chain, mode, LAYERS)
    peaks = [peak(chain, segments, size) for size in BATCHES]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("mode", MODES)
def test_weights_gradients_and_states_never_exceed_the_peak(
    chain: BlockChain, mode: str
) -> None:
    segments = treated(chain, mode, LAYERS)
    trace = chain.traces.affine(chain.settings.recipe(BATCH, segments))
    lasting = [CATEGORIES.index(name) for name in ("parameters", "optimizer_state")]
    kept = sum(
        int(trace.fixed_bytes[event - 1])
        for event in trace.events[trace.events > 0].tolist()
        if trace.category[event - 1] in lasting
    )
    assert kept <= peak(chain, segments, BATCH)


@pytest.mark.parametrize("mode", MODES)
def test_a_recipe_round_trips(chain: BlockChain, mode: str) -> None:
    recipe = chain.settings.recipe(BATCH, treated(chain, mode, LAYERS))
    kind = TypeAdapter(Recipe)
    assert kind.validate_json(kind.dump_json(recipe)) == recipe
