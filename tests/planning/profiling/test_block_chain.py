"""The chain formula against the judge, on real models (memory-model C4)."""

import itertools
from dataclasses import replace

import pytest
import torch

from budgetfit.core.recipe import Segment
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_points
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.memory.scratch_sizes.matmul import (
    CUBLASLT_WORKSPACE_BYTES,
    cublas_workspace_is_persistent,
    cublaslt_workspace_is_separate,
)
from budgetfit.planning.profiling.block_chain import (
    BlockChain,
    TrainingSettings,
    checkpoint_every_block,
)
from budgetfit.traces.session import TraceSession
from budgetfit.tracing.cuda.target import installed_torch_version
from budgetfit.workload.workload import Workload
from tests.models import MIB
from tests.traced import ADA, PAIRS, chains, session

BATCH = 64
LARGEST_DEVIATION = 0.01
# What is more than 1 % of models as small as these: a boundary in fp32, which a block
# under autocast may hold besides (which moment is the peak depends on torch); and in
# 2.11 a workspace of the backward's thread that only recomputed products ask for.
BOUNDARY_BYTES = BATCH * 16 * 32 * 4
BYTES = (
    CUBLASLT_WORKSPACE_BYTES + 2 * BOUNDARY_BYTES
    if cublaslt_workspace_is_separate(installed_torch_version())
    and cublas_workspace_is_persistent(installed_torch_version())
    else BOUNDARY_BYTES
)


def judged(chain: BlockChain, segments: tuple[Segment, ...]) -> int:
    """Apply a plan to a fake copy, trace it and replay it without a limit."""
    recipe = chain.settings.recipe(BATCH, segments)
    gpu = chain.traces.workload.gpu
    trace = chain.traces.exact(recipe)
    return replay(trace, BATCH, gpu, limit_bytes=UNLIMITED_BYTES).allocated_bytes


def pairs(chain: BlockChain) -> list[tuple[Segment, ...]]:
    """Return a segment of two for every two blocks that may share one."""
    blocks = chain.profile_at(BATCH).blocks
    return [
        (Segment((one.name, other.name)),)
        for one, other in itertools.pairwise(blocks)
        if one.joins_next and len(one.options) == len(other.options) > 1
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_the_formula_is_within_one_percent_of_the_judge(name: str) -> None:
    chain = chains(name, *PAIRS[name])
    blocks = chain.traces.workload.blocks
    plans = {
        "kept": (),
        "recomputed": checkpoint_every_block(blocks),
        "the first": (Segment(blocks[:1]),),
        "all but the last": checkpoint_every_block(blocks[:-1]),
        "a segment": pairs(chain)[-1],
    }
    found = {}
    for plan, segments in plans.items():
        formula, truth = (
            chain_peak_bytes(chain.profile_at(BATCH), segments),
            judged(chain, segments),
        )
        found[plan] = (formula - truth, max(BYTES, LARGEST_DEVIATION * truth))
    assert all(abs(error) <= allowed for error, allowed in found.values()), found


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_with_accumulation_too(name: str) -> None:
    chain = chains(name, *PAIRS[name], accumulation=2)
    blocks = chain.traces.workload.blocks
    for segments in ((), checkpoint_every_block(blocks), (Segment(blocks[-1:]),)):
        formula = chain_peak_bytes(chain.profile_at(BATCH), segments)
        assert formula == pytest.approx(
            judged(chain, segments), rel=LARGEST_DEVIATION, abs=BYTES
        )


def test_blocks_of_a_library_join_under_every_precision() -> None:
    # A hidden state that nothing saved dies between two blocks, and parts them not.
    for name in ("bert", "llama"):
        assert len(pairs(chains(name, *PAIRS[name]))) == 2
    assert len(pairs(chains("llama", ADA, "bf16"))) == 2


def test_an_encoder_and_its_decoder_are_two_chains() -> None:
    names = [segments[0].blocks for segments in pairs(chains("t5", *PAIRS["t5"]))]
    assert names == [
        ("encoder.block.0", "encoder.block.1"),
        ("decoder.block.0", "decoder.block.1"),
    ]


def test_a_chain_by_hand() -> None:
    # x + tanh(x W) three times, 4 samples of 1 MiB, W 1 MiB, under AdamW in a steady
    # step: three weights and two states of each.
    chain = BlockChain(
        session("mebi"), TrainingSettings(precision="fp32", optimizer="sgd")
    ).profile_at(4)
    assert chain.batch_size == 4
    blocks = [block for block in chain.blocks if len(block.options) > 1]
    assert [block.name for block in blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    for block in blocks:
        assert block.gradient_bytes == MIB
        assert block.output_bytes == 4 * MIB
        recomputed = block.option("recompute")
        assert recomputed is not None
        assert recomputed.saved_bytes == 4 * MIB
    # tanh, and x where it is no batch that lives anyway.
    assert [block.keep.saved_bytes // MIB for block in blocks] == [4 + 4] * 3


def test_every_phase_of_a_block_has_a_point() -> None:
    chain = chains("gpt2", *PAIRS["gpt2"]).profile_at(BATCH)
    labels = [point.label for point in chain_points(chain, ())]
    assert labels[0] == "forward <prologue>"
    assert labels[-1] == "optimizer step"
    assert len(labels) == 2 * len(chain.blocks) + 1


def test_accumulation_follows_from_the_effective_batch() -> None:
    plain = TrainingSettings(precision="fp32", optimizer="sgd")
    assert plain.accumulation_at(8) == 1
    effective = TrainingSettings(
        precision="fp32", optimizer="sgd", effective_batch_size=64
    )
    assert effective.accumulation_at(8) == 8
    assert effective.recipe(16).effective_batch_size == 64
    fixed = TrainingSettings(precision="fp32", optimizer="sgd", accumulation=4)
    assert fixed.recipe(2).effective_batch_size == 8


@pytest.mark.parametrize("effective", [None, 4])
def test_a_profile_at_one_size_takes_one_trace_of_each_program(
    monkeypatch: pytest.MonkeyPatch, effective: int | None
) -> None:
    settings = TrainingSettings(
        precision="fp32", optimizer="sgd", effective_batch_size=effective
    )
    workload = session("mebi").workload
    of_all_sizes = BlockChain(TraceSession(workload), settings)
    expected = of_all_sizes.profile_at(4)
    assert of_all_sizes.only_at(4) is of_all_sizes

    def refuse(*_: object) -> None:
        raise AssertionError("traced at two batch sizes")

    monkeypatch.setattr(TraceSession, "affine", refuse)
    found = BlockChain(TraceSession(workload), settings).only_at(4).profile_at(4)
    recomputed = checkpoint_every_block(workload.blocks)
    offloaded = tuple(replace(each, mode="offload") for each in recomputed)
    for segments in ((), recomputed, offloaded):
        one, other = (chain_peak_bytes(each, segments) for each in (found, expected))
        assert one == other


class RowByRow(torch.nn.Module):
    """Its number of ops depends on the batch size, as that of images in a row does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.linear(row).tanh() for row in x])


def test_where_each_size_is_traced_others_are_on_a_line_to_search_by() -> None:
    model = torch.nn.Sequential(*(RowByRow() for _ in range(4)))
    workload = Workload(model=model, batch=torch.zeros(2, 2048, 512), gpu=find_gpu(ADA))
    chain = BlockChain(
        TraceSession(workload.with_found_blocks()),
        TrainingSettings(precision="fp32", optimizer="sgd", accumulation=2),
    )
    on_line = chain.profile_at(12, exact_blocks=False)
    assert not any("batch 12" in each for each in chain.traces.log)
    # The options of the third size are those of the second, for as many more samples.
    with_options = [
        [each for each in chain.traces.log if f"at batch {size}, 4 blocks" in each]
        for size in (2, 3)
    ]
    assert len(with_options[0]) > len(with_options[1]) == 1
    roughly = chain.profile_at(3, exact_blocks=False)
    traced = chain.profile_at(3)
    for made, own in zip(roughly.blocks, traced.blocks, strict=True):
        for option, other in zip(made.options, own.options, strict=True):
            assert (option.mode, option.saved_ops) == (other.mode, other.saved_ops)
            assert option.saved_bytes == pytest.approx(other.saved_bytes, rel=0.01)
            # Pinned memory is in powers of two.
            assert option.host_bytes <= other.host_bytes <= 2 * option.host_bytes
    measured = chain.profile_at(12)
    assert any("traced fp32 at batch 12" in each for each in chain.traces.log)
    for segments in ((), checkpoint_every_block(chain.traces.workload.blocks)):
        one, other = (chain_peak_bytes(each, segments) for each in (on_line, measured))
        assert abs(one - other) <= 0.05 * other


def test_everything_kept_is_enough_where_nothing_else_is_proposed() -> None:
    name = next(iter(PAIRS))
    fresh = BlockChain(session(name), chains(name, *PAIRS[name]).settings)
    gaps: list[int] = []

    def enough(gap: int) -> bool:
        gaps.append(gap)
        return True

    assert [fresh.reserve_bytes(1, enough)] == gaps
    profile = fresh.only_kept.profile_at(1)
    assert all(len(block.options) == 1 for block in profile.blocks)
    assert all(" 0 blocks recomputed" in each for each in fresh.traces.log)
    assert fresh.reserve_bytes(1) <= gaps[0]
