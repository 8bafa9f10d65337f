"""One session's traces: each program once, and what a model that cannot run is told."""

import queue
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError, TraceError
from budgetfit.gpus.table import find_gpu
from budgetfit.traces import errors as module_of_errors
from budgetfit.traces import tracer as module_of_tracer
from budgetfit.traces.session import TraceSession
from budgetfit.tracing.depth_extrapolation.owned_trace import first_difference
from budgetfit.tracing.recording.batch_scaling import NotAffineError
from budgetfit.tracing.values.assumptions import ANSWERED_NO, FULL_MASK, READ_NUMBER
from budgetfit.tracing.values.concrete_execution import REAL_VALUES
from budgetfit.workload.workload import Workload
from tests.models import EXAMPLES, Chain

ADA = find_gpu("rtx-4090")


@pytest.fixture
def traces() -> TraceSession:
    example = EXAMPLES["mebi"]
    workload = Workload(model=example.model(), batch=example.batch, gpu=ADA)
    return TraceSession(workload.with_found_blocks())


def test_a_program_is_traced_once_at_two_sizes_for_all_of_them(
    traces: TraceSession,
) -> None:
    first = traces.affine(Recipe(batch_size=4))
    assert first.batch_sizes == (2, 3)
    assert traces.affine(Recipe(batch_size=100)) is first
    assert traces.exact(Recipe(batch_size=7)) is first  # it holds there too
    assert len(traces.log) == 2


def test_a_models_own_checkpointing_is_another_program_and_stays_on_there() -> None:
    example = EXAMPLES["gpt2"]
    model = example.model()
    for block in model.transformer.h:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = _checkpoint
    workload = Workload(model=model, batch=example.batch, gpu=ADA).with_found_blocks()
    traces = TraceSession(workload)
    kept = traces.exact(Recipe(batch_size=2), keep_own_checkpointing=True)
    off = traces.exact(Recipe(batch_size=2))
    assert kept is not off
    assert len(kept.events) > len(off.events)  # blocks run once more


def _checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def test_a_single_recipe_is_traced_once_at_its_own_size(traces: TraceSession) -> None:
    one = traces.exact(Recipe(batch_size=5))
    assert one.batch_sizes == (5,)
    assert traces.exact(Recipe(batch_size=5)) is one
    assert traces.exact(Recipe(batch_size=6)) is not one
    assert len(traces.log) == 2


def test_a_size_that_any_program_runs_at_is_not_tried_again(
    traces: TraceSession,
) -> None:
    traces.exact(Recipe(batch_size=1, precision="bf16-mixed"))
    assert traces.smallest_batch(Recipe(batch_size=4)) == 1
    assert len(traces.log) == 1


def test_a_batch_of_one_is_traced_for_itself(traces: TraceSession) -> None:
    line = traces.affine(Recipe(batch_size=1))
    assert line.batch_sizes == (2, 3)
    assert traces.exact(Recipe(batch_size=1)).batch_sizes == (1,)
    assert traces.exact(Recipe(batch_size=2)) is line


def test_what_cannot_run_with_one_sample_is_not_judged_by_the_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # wants two values
    traces = TraceSession(Workload(model=model, batch=torch.zeros(2, 4), gpu=ADA))
    one = Recipe(batch_size=1)
    assert traces.affine(one).batch_sizes == (2, 3)
    assert traces.smallest_searched(one) == 1  # not known yet
    with pytest.raises(TraceError, match="more than 1 value"):
        traces.exact(one)
    assert traces.smallest_batch(one) == traces.smallest_searched(one) == 2


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
def test_what_changes_the_program_is_traced_anew(
    traces: TraceSession, other: Recipe
) -> None:
    assert traces.exact(other) is not traces.exact(Recipe(batch_size=4))


def test_the_second_micro_batch_stands_for_all_that_follow(
    traces: TraceSession,
) -> None:
    two, nine = (
        traces.exact(Recipe(batch_size=4, gradient_accumulation_steps=steps))
        for steps in (2, 9)
    )
    assert two is nine
    assert {phase.micro_step for phase in two.phases} == {0, 1}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_program_and_the_same_with_accumulation_take_the_same_runs(
    traces: TraceSession, steps: int
) -> None:
    once = Recipe(batch_size=7, segments=(Segment(("blocks.0",)),))
    other = replace(once, gradient_accumulation_steps=3 - steps)
    alone = TraceSession(traces.workload).affine(other)
    traces.affine(replace(once, gradient_accumulation_steps=steps))
    derived = traces.exact(other)
    assert not first_difference(derived, alone)
    assert [line.split()[0] for line in traces.log] == ["traced"] * 2 + ["derived"] * 2
    # What was derived from a run has not changed it.
    again = traces.exact(replace(once, batch_size=1, gradient_accumulation_steps=2))
    derived = traces.exact(replace(once, batch_size=1))
    alone = TraceSession(traces.workload).exact(replace(once, batch_size=1))
    assert len(again.events) > len(derived.events)
    assert not first_difference(derived, alone)


def test_every_trace_has_a_first_and_a_steady_step(traces: TraceSession) -> None:
    trace = traces.exact(Recipe(batch_size=2))
    assert sorted({phase.step for phase in trace.phases}) == [-1, 0, 1]


def test_progress_and_log_say_what_is_traced() -> None:
    example = EXAMPLES["mebi"]
    said: list[str] = []
    workload = Workload(model=example.model(), batch=example.batch, gpu=ADA)
    traces = TraceSession(workload.with_found_blocks(), said.append)
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
def test_a_question_about_unknown_values_is_answered_by_a_rule_that_is_noted(
    batch_size: int,
) -> None:
    workload = Workload(model=Chooses(), batch=torch.zeros(2, 4), gpu=ADA)
    trace = TraceSession(workload).exact(Recipe(batch_size=batch_size))
    assert FULL_MASK in trace.notes


class LeavesEarly(nn.Module):
    """Leaves once a block is sure; no comparison of unknown values says when."""

    def __init__(self, is_sure: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.is_sure = is_sure
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).sigmoid()
            if self.is_sure(x):
                break
        return x


@pytest.mark.parametrize(
    "is_sure",
    [lambda x: x.mean() > 0.9, lambda x: x.mean().item() > 0.9, lambda _: False],
    ids=["question", "number", "never"],
)
def test_a_model_that_may_leave_early_is_traced_with_all_of_its_blocks(
    is_sure: Callable[[torch.Tensor], bool],
) -> None:
    model = LeavesEarly(is_sure)
    blocks = tuple(f"blocks.{n}" for n in range(3))
    batch = torch.zeros(2, 4)
    session = TraceSession(Workload(model=model, batch=batch, blocks=blocks, gpu=ADA))
    for size in (2, 8):  # the second goes on with what the first found
        trace = session.exact(Recipe(batch_size=size))
        assert trace.blocks == blocks
        said = any(note.startswith(ANSWERED_NO) for note in trace.notes)
        assert said is (is_sure(torch.ones(1)) is not False)
        assert not any(
            note.startswith((FULL_MASK, READ_NUMBER)) for note in trace.notes
        )


# A list that its code leads to would be as before the trace.
LENGTHS: queue.SimpleQueue[int] = queue.SimpleQueue()


class Repeats(nn.Module):
    """Repeats each row as often as its weights say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        often = self.linear(x)[..., 0].exp().round().long().clamp(1, 4)
        rows = torch.repeat_interleave(x.flatten(0, 1), often.flatten(), 0)
        LENGTHS.put(len(rows))
        return self.linear(rows)


def test_where_weights_decide_sizes_they_are_computed_with_real_values() -> None:
    torch.manual_seed(0)
    model, batch = Repeats(), torch.randn(4, 6, 4)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    while LENGTHS.qsize():
        LENGTHS.get()
    model(batch[:1])
    of_first = LENGTHS.get()
    traces = TraceSession(Workload(model=model, batch=batch, gpu=ADA))
    line = traces.affine(Recipe(batch_size=8))
    assert line.batch_sizes == (2, 3)
    assert of_first != batch.shape[1]
    assert [LENGTHS.get() for _ in range(2)] == [2 * of_first, 3 * of_first]
    assert LENGTHS.empty()
    assert line.notes[0] == REAL_VALUES
    assert any(row.startswith("real values from here on") for row in traces.log)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_real_values_decide_without_any_weights_too() -> None:
    with torch.device("meta"):
        model = Repeats()
    workload = Workload(model=model, batch=torch.randn(4, 6, 4), gpu=ADA)
    assert TraceSession(workload).exact(Recipe(batch_size=4)).notes[0] == REAL_VALUES


class CountsSteps(nn.Module):
    """Halves its input until it is small: how often is for the weights to say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        while x.norm() > 0.1:
            x = x * 0.5
        return x


def test_a_loop_that_values_end_is_computed_with_real_values() -> None:
    workload = Workload(model=CountsSteps(), batch=torch.randn(2, 4), gpu=ADA)
    assert TraceSession(workload).exact(Recipe(batch_size=2)).notes[0] == REAL_VALUES


@pytest.mark.parametrize("batch_size", [2, 8])
def test_a_model_too_large_for_real_values_is_named_with_the_op(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (module_of_tracer, module_of_errors):
        monkeypatch.setattr(module, "MAX_WEIGHTS_BYTES", 16)
    workload = Workload(model=Repeats(), batch=torch.zeros(2, 4, 4), gpu=ADA)
    with pytest.raises(TraceError, match="weights of 16 B or less") as caught:
        TraceSession(workload).exact(Recipe(batch_size=batch_size))
    assert caught.value.module == "Repeats"
    assert caught.value.op == "aten.repeat_interleave.Tensor"


def test_a_batch_that_the_model_does_not_accept_is_a_trace_error() -> None:
    workload = Workload(model=nn.Linear(4, 4), batch=torch.zeros(2, 5), gpu=ADA)
    with pytest.raises(TraceError, match="Linear cannot run on fake tensors"):
        TraceSession(workload).affine(Recipe(batch_size=2))


def test_errors_of_ours_come_through_as_they_are() -> None:
    example = EXAMPLES["mebi"]
    workload = Workload(model=example.model(), batch=example.batch, gpu=ADA)
    with pytest.raises(InputError, match=r"no block 'blocks\.9'"):
        TraceSession(workload).affine(
            Recipe(batch_size=2, segments=(Segment(("blocks.9",)),))
        )


class _Square(Chain):
    """Has scores of every sample against every other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return (x @ x.T).tanh()


def test_what_is_on_no_line_with_everything_kept_is_tried_at_two_sizes_once() -> None:
    square = _Square(*(nn.Linear(8, 8) for _ in range(3)))
    workload = Workload(model=square, batch=torch.zeros(2, 8), gpu=ADA)
    traces = TraceSession(workload.with_found_blocks())
    kept = Recipe(batch_size=2)
    assert not traces.is_affine(kept)
    before = len(traces.log)
    segments = tuple(Segment((name,)) for name in traces.workload.blocks)
    recomputed = replace(kept, segments=segments)
    assert not traces.is_affine(recomputed)
    assert len(traces.log) == before
    assert traces.affine(recomputed).batch_sizes == (2,)


class Heads(nn.Module):
    """Heads that are used in turns: this batch trains the first."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.first(self.body(x)).sum()
        return loss


@pytest.mark.parametrize(
    ("make", "changes", "noted"),
    [
        (Heads, {}, True),
        (partial(Heads, 1), {}, False),  # under one per cent of the weights
        (Heads, {"optimizer": "sgd", "optimizer_in_backward": True}, False),
        (lambda: frozen(Heads()), {}, False),
        (lambda: nn.Sequential(nn.Linear(64, 64)), {}, False),
    ],
)
def test_weights_that_other_batches_may_train_are_noted(
    make: Callable[[], nn.Module], changes: dict[str, Any], *, noted: bool
) -> None:
    workload = Workload(model=make(), batch=torch.zeros(2, 64), gpu=ADA, loss=loss_of)
    notes = TraceSession(workload).affine(Recipe(batch_size=2, **changes)).notes
    assert any("second.weight, second.bias" in each for each in notes) == noted
    assert any("16.2 KiB of weights" in each for each in notes) == noted


def frozen(model: Heads) -> Heads:
    model.second.requires_grad_(requires_grad=False)
    return model


def loss_of(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.sum()


class RowByRow(nn.Module):
    """Its number of ops depends on the batch size, as that of images in a row does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.linear(row).tanh() for row in x])


def test_blocks_that_are_on_no_line_are_compared_at_the_size_that_showed_it() -> None:
    model = nn.Sequential(*(RowByRow() for _ in range(16)))
    workload = Workload(model=model, batch=torch.zeros(2, 4), gpu=ADA)
    traces = TraceSession(workload.with_found_blocks())
    assert traces.affine(Recipe(batch_size=2)).batch_sizes == (2,)
    runs = [row for row in traces.log if row.startswith("traced")]
    assert ["batch 2" in row for row in runs] == [True, False, False]
    assert all("shortened" in row for row in runs)
    # So it is when the model is evaluated: neither size is traced for that.
    traces.exact(Recipe(batch_size=3))
    with (
        mock.patch.object(
            module_of_tracer, "trace_evaluation", side_effect=AssertionError
        ),
        pytest.raises(NotAffineError),
    ):
        traces.evaluation("fp32")
