"""Values of small whole-number tensors, beside their fakes."""

# ruff: noqa: ARG005, SLF001 - some questions ignore what they are given
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from budgetfit.tracing.fake_model import fake_mode
from budgetfit.tracing.known_values import LARGEST_ELEMENTS, MOST_FLOATS, KnownValues
from budgetfit.tracing.storage_log import StorageLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Stand = "Callable[[torch.Tensor], torch.Tensor]"


@pytest.fixture
def stand_in() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Return a fake tensor whose values are those of a real one."""
    values = KnownValues()

    def fake(real: torch.Tensor) -> torch.Tensor:
        twin = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
        values.remember(twin, real)
        return twin

    with fake_mode(), StorageLog(None, values.run):
        yield fake


MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all": lambda x: bool((x == 1).all()),
    "any": lambda x: bool((x == 0).any()),
    "sum": lambda x: int(x.sum()),
    "item": lambda x: x[0, 3].item(),
    "list": lambda x: x.sum(1).tolist(),
    "running": lambda x: (x.cumsum(1) * x)[1].tolist(),
    "maximum": lambda x: int(x.max()),
    "equal": lambda x: torch.equal(x, x.clone()),
    "not equal": lambda x: torch.equal(x, x + 1),
    "argmax": lambda x: x.argmax(1).tolist(),
    "where": lambda x: torch.where(x == 0, -100, x).tolist(),
    "made here": lambda x: int((torch.arange(4) * x[0]).sum()),
    "filled": lambda x: int(torch.zeros_like(x).sum() + torch.full((2,), 7).sum()),
    "of a constant": lambda x: int((torch.tensor([2, 3]) + x.sum()).sum()),
    "in place": lambda x: int(x.clone().add_(1).sum()),
    "through a view": lambda x: int(x.t().reshape(-1)[:3].sum()),
    "through floats": lambda x: (x.float() * 2.0).sum().item(),
    "a mask of ones": lambda x: bool(torch.ones(2, 4).to(torch.bool).all()),
    "bincount": lambda x: torch.bincount(x.reshape(-1)).tolist(),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_as_the_real_tensor_would(
    stand_in: Callable[[torch.Tensor], torch.Tensor], question: str
) -> None:
    ask = QUESTIONS[question]
    twin = stand_in(MASK)
    got = ask(twin)
    with torch.utils._python_dispatch._disable_current_modes():
        assert got == ask(MASK.clone())


SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "mask of rows": lambda x: x[x[:, 2] > 0],
    "mask after a slice": lambda x: x[:, x[0] > 0],
    "masked select": lambda x: x.masked_select(x > 0),
    "unique": torch.unique,
    "repeat": lambda x: torch.repeat_interleave(x[0]),
    "where": lambda x: torch.where(x > 0)[1],
}


@pytest.mark.parametrize("question", SHAPES)
def test_a_shape_that_depends_on_values_is_the_real_one(
    stand_in: Callable[[torch.Tensor], torch.Tensor], question: str
) -> None:
    ask = SHAPES[question]
    out = ask(stand_in(MASK))
    with torch.utils._python_dispatch._disable_current_modes():
        real = ask(MASK.clone())
    assert out.shape == real.shape
    assert out.dtype == real.dtype
    assert out.tolist() == real.tolist()  # and its values are known in turn


def _through_a_view(x: torch.Tensor) -> int:
    copy = x.clone()
    view = copy[0]
    copy.copy_(torch.randint(0, 9, (2, 4)))
    return int(view.sum())


UNKNOWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "a float": lambda x: (torch.empty(2, 4) * x).sum().item(),
    "a float by itself": lambda x: torch.empty(()).item(),
    "a float's mask": lambda x: bool((torch.empty(4) > 0).any()),
    "a random number": lambda x: int(torch.randint(0, 9, (4,)).sum()),
    "random like a known one": lambda x: int(torch.randint_like(x, 9).sum()),
    "made random in place": lambda x: int(x.clone().random_(0, 9).sum()),
    "several random floats": lambda x: torch.rand(2).sum().item(),
    "a random permutation": lambda x: torch.randperm(4).tolist(),
    "memory as it comes": lambda x: torch.empty(2, dtype=torch.long).tolist(),
    "a copy of the unknown": lambda x: int(
        x.clone().copy_(torch.randint(0, 9, (2, 4))).sum()
    ),
    "a view of what became unknown": _through_a_view,
    "whole numbers from floats": lambda x: int(torch.empty(4).argmax()),
    "an unknown mask": lambda x: x[torch.randint(0, 2, (2, 4)) > 0],
}


@pytest.mark.parametrize("question", UNKNOWN)
def test_what_depends_on_weights_or_chance_is_not_guessed(
    stand_in: Callable[[torch.Tensor], torch.Tensor], question: str
) -> None:
    twin = stand_in(MASK)
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        UNKNOWN[question](twin)


def test_a_tensor_that_was_not_remembered_is_unknown(
    stand_in: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    known = stand_in(MASK)
    unknown = torch.empty(2, 4, dtype=torch.long)
    with pytest.raises(DataDependentOutputException):
        int((known + unknown).sum())


def test_what_is_too_large_to_be_worth_its_time_is_unknown() -> None:
    values = KnownValues()
    with fake_mode(), StorageLog(None, values.run):
        small = torch.zeros(LARGEST_ELEMENTS, dtype=torch.long)
        assert int(small.sum()) == 0
        large = torch.zeros(LARGEST_ELEMENTS + 1, dtype=torch.long)
        with pytest.raises(DataDependentOutputException):
            int(large.sum())
        floats = torch.zeros(MOST_FLOATS + 1)
        with pytest.raises(DataDependentOutputException):
            floats.sum().item()


def test_a_lone_random_number_lets_every_layer_run() -> None:
    values = KnownValues()
    with fake_mode(), StorageLog(None, values.run):
        for chance in (torch.rand([]), torch.rand(1)):
            assert not chance < 0.999999  # layerdrop: skip if below its probability
            assert chance < 1


def test_following_values_leaves_no_mark_in_the_log() -> None:
    def ask(x: torch.Tensor) -> None:
        bool((x == 1).all())

    values = KnownValues()
    with fake_mode(), StorageLog(None, values.run) as log:
        twin = torch.empty(2, 4, dtype=torch.long)
        values.remember(twin, MASK)
        ask(twin)
        with_values = list(log.sizes)
    with StorageLog() as log:
        ask(MASK.clone())
    assert with_values == log.sizes


def test_values_are_forgotten_with_their_tensors() -> None:
    values = KnownValues()
    with fake_mode(), StorageLog(None, values.run):
        x = torch.arange(4)
        y = x + 1
        assert len(values._real) == 2
        del x, y
    assert len(values._real) == 0


def test_zeros_like_an_unknown_tensor_are_known() -> None:
    values = KnownValues()
    with fake_mode(), StorageLog(None, values.run):
        unknown = torch.empty(3, 4)
        assert not torch.zeros_like(unknown).any()
        assert torch.ones_like(unknown, dtype=torch.int64).sum().item() == 12
