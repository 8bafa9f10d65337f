"""One session's traces: each program once, and what a model that cannot run is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from budgetfit.core.errors import InputError, TraceError
from budgetfit.core.gpus import find_gpu
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.planning.subject import Subject
from budgetfit.planning.traces import Traces
from tests.models import EXAMPLES

ADA = find_gpu("rtx-4090")


@pytest.fixture
def traces() -> Traces:
    example = EXAMPLES["mebi"]
    subject = Subject(model=example.model(), batch=example.batch, gpu=ADA)
    return Traces(subject.with_found_blocks())


def test_a_program_is_traced_once_at_two_sizes_for_all_of_them(traces: Traces) -> None:
    first = traces.of(Recipe(batch_size=4))
    assert first.batch_sizes == (2, 3)
    assert traces.of(Recipe(batch_size=100)) is first
    assert traces.exact(Recipe(batch_size=7)) is first  # it holds there too
    assert len(traces.log) == 2


def test_a_single_recipe_is_traced_once_at_its_own_size(traces: Traces) -> None:
    one = traces.exact(Recipe(batch_size=5))
    assert one.batch_sizes == (5,)
    assert traces.once(Recipe(batch_size=5)) is one
    assert traces.exact(Recipe(batch_size=6)) is not one
    assert len(traces.log) == 2


def test_a_batch_of_one_is_traced_for_itself(traces: Traces) -> None:
    line = traces.of(Recipe(batch_size=1))
    assert line.batch_sizes == (2, 3)
    assert traces.exact(Recipe(batch_size=1)).batch_sizes == (1,)
    assert traces.exact(Recipe(batch_size=2)) is line


def test_what_cannot_run_with_one_sample_is_judged_by_the_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # wants two values
    traces = Traces(Subject(model=model, batch=torch.zeros(2, 4), gpu=ADA))
    line = traces.of(Recipe(batch_size=1))
    assert traces.exact(Recipe(batch_size=1)) is line
    assert "batch 1 is not traced" in traces.log[-1]


@pytest.mark.parametrize(
    "other",
    [
        Recipe(batch_size=4, precision="bf16-mixed"),
        Recipe(batch_size=4, optimizer="sgd"),
        Recipe(batch_size=4, segments=(Segment(("blocks.0",)),)),
        Recipe(batch_size=4, gradient_accumulation_steps=2),
    ],
    ids=str,
)
def test_what_changes_the_program_is_traced_anew(traces: Traces, other: Recipe) -> None:
    assert traces.exact(other) is not traces.exact(Recipe(batch_size=4))


def test_the_second_micro_batch_stands_for_all_that_follow(traces: Traces) -> None:
    two, nine = (
        traces.exact(Recipe(batch_size=4, gradient_accumulation_steps=steps))
        for steps in (2, 9)
    )
    assert two is nine
    assert {phase.micro_step for phase in two.phases} == {0, 1}


def test_every_trace_has_a_first_and_a_steady_step(traces: Traces) -> None:
    trace = traces.exact(Recipe(batch_size=2))
    assert sorted({phase.step for phase in trace.phases}) == [-1, 0, 1]


def test_progress_and_log_say_what_is_traced() -> None:
    example = EXAMPLES["mebi"]
    said: list[str] = []
    subject = Subject(model=example.model(), batch=example.batch, gpu=ADA)
    traces = Traces(subject.with_found_blocks(), said.append)
    traces.exact(Recipe(batch_size=2, segments=(Segment(("blocks.0",)),)))
    assert said == ["tracing batch 2, fp32, 1 of 3 blocks recomputed"]
    assert traces.log[0].startswith("traced fp32 at batch 2, 1 blocks recomputed: ")


class Chooses(nn.Module):
    """Asks for a value that only real weights could give."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("batch_size", [2, 8])
def test_a_model_that_asks_for_unknown_values_is_named_with_the_op(
    batch_size: int,
) -> None:
    subject = Subject(model=Chooses(), batch=torch.zeros(2, 4), gpu=ADA)
    with pytest.raises(TraceError, match="Pass an example batch") as caught:
        Traces(subject).exact(Recipe(batch_size=batch_size))
    assert caught.value.module == "Chooses"
    assert caught.value.op == "aten._local_scalar_dense.default"


def test_a_batch_that_the_model_does_not_accept_is_a_trace_error() -> None:
    subject = Subject(model=nn.Linear(4, 4), batch=torch.zeros(2, 5), gpu=ADA)
    with pytest.raises(TraceError, match="Linear cannot run on fake tensors"):
        Traces(subject).of(Recipe(batch_size=2))


def test_errors_of_ours_come_through_as_they_are() -> None:
    example = EXAMPLES["mebi"]
    subject = Subject(model=example.model(), batch=example.batch, gpu=ADA)
    with pytest.raises(InputError, match=r"no block 'blocks\.9'"):
        Traces(subject).of(Recipe(batch_size=2, segments=(Segment(("blocks.9",)),)))
