"""Two batch sizes are enough for all of them (tracing T6)."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import Affine, SizeLimit, StepTrace
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import device_properties, replay, storage_bytes
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.traces.cache.cache import read_trace, write_trace
from budgetfit.traces.session import TraceSession
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.recording.batch_scaling import (
    NotAffineError,
    affine_trace,
    exact_trace,
)
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.tracing.recording.steady_state import append_steady_step
from budgetfit.workload.workload import Workload
from tests.traced import ADA, PAIRS, T4, line, raw_trace, session

CASES = [
    *((name, *PAIRS[name], recompute) for name in PAIRS for recompute in (False, True)),
    ("gpt2", ADA, "fp32", False),
    ("llama", T4, "fp16-mixed", True),
]


def target_of(gpu: str) -> CudaTarget:
    return CudaTarget(
        compute_capability=find_gpu(gpu).compute_capability, torch_version=(2, 13)
    )


@pytest.mark.parametrize(("name", "gpu", "precision", "recompute"), CASES)
def test_batch_8_is_predicted_to_the_byte_from_2_and_3(
    name: str, gpu: str, precision: str, recompute: bool
) -> None:
    predicted = line(name, gpu, precision, recompute=recompute)
    assert predicted.batch_sizes == (2, 3)
    blocks = session(name, gpu).workload.blocks
    recipe = Recipe(
        batch_size=8,
        precision=precision,
        segments=checkpoint_every_block(blocks) if recompute else (),
    )
    raw = raw_trace(name, recipe, target=session(name, gpu).workload.target)
    append_steady_step(raw)
    traced = exact_trace(raw, blocks)
    assert predicted.events.tolist() == traced.events.tolist()
    assert predicted.phases == traced.phases
    assert predicted.passes == traced.passes
    assert predicted.category.tolist() == traced.category.tolist()
    assert predicted.layer.tolist() == traced.layer.tolist()
    asked = [[a.at(8) for a in row.arguments] for row in predicted.scratch]
    assert asked == [[a.at(8) for a in row.arguments] for row in traced.scratch]
    card = device_properties(find_gpu(gpu))
    assert np.array_equal(
        storage_bytes(predicted, 8, card), storage_bytes(traced, 8, card)
    )
    flops = predicted.ops.flops_fixed + 8 * predicted.ops.flops_per_sample
    assert flops == pytest.approx(traced.ops.flops_fixed)
    moved = predicted.ops.bytes_fixed + 8 * predicted.ops.bytes_per_sample
    assert moved == pytest.approx(traced.ops.bytes_fixed)


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace, file = line("gpt2"), tmp_path / "trace.npz"
    with file.open("wb") as opened:
        write_trace(opened, "key", trace)
    again = read_trace(file, "key")
    gpu = find_gpu(ADA)
    assert replay(again, 5, gpu) == replay(trace, 5, gpu)
    for each in fields(StepTrace):
        left, right = (getattr(one, each.name) for one in (again, trace))
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert np.array_equal(left, right)
        elif each.name != "ops":
            assert left == right, each.name


def raw_of(batch_size: int, *, recompute: bool = False) -> RawTrace:
    blocks = session("mebi").workload.blocks
    recipe = Recipe(
        batch_size=batch_size,
        optimizer="sgd",
        segments=checkpoint_every_block(blocks) if recompute else (),
    )
    return raw_trace("mebi", recipe, target=target_of(ADA))


def test_a_trace_of_one_size_holds_for_that_size_alone() -> None:
    trace = exact_trace(raw_of(2), session("mebi").workload.blocks)
    assert trace.batch_sizes == (2,)
    assert not trace.bytes_per_sample.any()
    with pytest.raises(ValueError, match="holds for batch size 2 only, not for 3"):
        replay(trace, 3, find_gpu(ADA))


def test_two_programs_are_no_line() -> None:
    with pytest.raises(NotAffineError, match="2 and 3 have different allocations"):
        affine_trace(raw_of(2), raw_of(3, recompute=True), ())


def test_what_differs_is_named() -> None:
    first, second = raw_of(2), raw_of(3)
    second.phases = second.phases[:-1]
    with pytest.raises(NotAffineError, match="different phases"):
        affine_trace(first, second, ())
    second = raw_of(3)
    second.passes = second.passes[:-1]
    with pytest.raises(NotAffineError, match="different block passes"):
        affine_trace(first, second, ())
    second = raw_of(3)
    index, row = next(iter(second.log.scratch.items()))
    second.log.scratch[index] = row._replace(rule="another")
    with pytest.raises(NotAffineError, match="different kernel scratch"):
        affine_trace(first, second, ())
    second = raw_of(3)
    second.log.ops.pop()
    with pytest.raises(NotAffineError, match="different ops"):
        affine_trace(first, second, ())


def test_a_step_that_is_traced_at_one_size_and_copied_at_the_other_has_one_limit() -> (
    None
):
    first, second = raw_of(2), raw_of(3)
    for raw, steps in ((first, 1), (second, 2)):
        limit = SizeLimit("aten.sort", "elements", 5 * raw.batch_size, 99, "Sort.cpp")
        raw.log.limits += [limit] * steps
    blocks = session("mebi").workload.blocks
    (found,) = affine_trace(first, second, blocks).size_limits
    assert found.number == Affine(0, 5)


class Contrast(nn.Module):
    """Every sample against every other: [batch, batch] scores."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tower(x)
        return functional.cross_entropy(x @ x.t(), torch.arange(len(x)))


def test_what_grows_with_the_square_of_the_batch_is_traced_at_each_size() -> None:
    workload = Workload(model=Contrast(), batch=torch.zeros(2, 8), gpu=find_gpu(ADA))
    traces = TraceSession(workload)
    trace = traces.affine(Recipe(batch_size=8))
    assert trace.batch_sizes == (8,)
    assert 4 * 8 * 8 in trace.fixed_bytes.tolist()
    assert "2 and 3 are on no line: 16 and 36" in " ".join(traces.log)


def test_a_size_that_stays_is_fixed_and_one_that_grows_has_a_slope() -> None:
    trace = affine_trace(raw_of(2), raw_of(3), session("mebi").workload.blocks)
    mib = 1 << 20
    weight = trace.fixed_bytes.tolist().index(mib)
    assert trace.bytes_per_sample[weight] == 0
    batch = trace.bytes_per_sample.tolist().index(mib)
    assert trace.fixed_bytes[batch] == 0
