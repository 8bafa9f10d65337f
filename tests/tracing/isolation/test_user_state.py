"""Code that keeps tensors outside of its modules holds no fakes after a trace."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.errors import BudgetfitError
from budgetfit.tracing.isolation.user_state import user_state_preserved

TABLE: dict[int, torch.Tensor] = {}
FIRST: torch.Tensor | None = None


def in_a_table() -> torch.Tensor:
    if 4 not in TABLE:
        TABLE[4] = torch.ones(4)
    return TABLE[4]


def in_a_global() -> torch.Tensor:
    global FIRST  # noqa: PLW0603
    if FIRST is None:
        FIRST = torch.ones(4)
    return FIRST


def memo(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    known: list[torch.Tensor] = []
    last = None

    @functools.wraps(function)
    def call() -> torch.Tensor:
        nonlocal last
        if not known:
            known.append(function())
        last = known[0] if last is None else last
        return last

    return call


@memo
def in_a_closure() -> torch.Tensor:
    return torch.ones(4)


def in_an_attribute() -> torch.Tensor:
    if not hasattr(in_an_attribute, "kept"):
        in_an_attribute.kept = torch.ones(4)  # type: ignore[attr-defined]
    kept: torch.Tensor = in_an_attribute.kept  # type: ignore[attr-defined]
    return kept


def in_a_default(known: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
    if not known:
        known.append(torch.ones(4))
    return known[0]


class Constants:
    """A plain class, whose attributes are caches."""

    ones: torch.Tensor | None = None
    table: dict[int, torch.Tensor] = {}  # noqa: RUF012

    @classmethod
    def in_a_class(cls) -> torch.Tensor:
        if cls.ones is None:
            cls.ones = torch.ones(4)
        return cls.ones

    @staticmethod
    def in_a_table() -> torch.Tensor:
        return Constants.table.setdefault(4, torch.ones(4))


class Helper:
    """A plain object, whose methods call functions that remember."""

    def __call__(self) -> torch.Tensor:
        return in_a_table() + self.other()

    def other(self) -> torch.Tensor:
        return in_a_global()


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.helper = Helper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.helper() + in_a_closure() + in_an_attribute() + in_a_default()
        kept = kept + Constants.in_a_class() + Constants.in_a_table()
        return self.linear(x) + kept


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def caching_loss(output: torch.Tensor, _: object) -> torch.Tensor:
    kept = in_a_table() + in_a_global() + in_a_closure() + in_an_attribute()
    kept = kept + in_a_default() + Constants.in_a_class() + Constants.in_a_table()
    return (output * kept).sum()


def remembered() -> list[Any]:
    return [
        *TABLE.values(),
        FIRST,
        *(cell.cell_contents for cell in in_a_closure.__closure__ or ()),
        vars(in_an_attribute),
        in_a_default.__defaults__,
        Constants.ones,
        Constants.table,
    ]


@pytest.mark.parametrize("run", [budgetfit.estimate, budgetfit.plan])
@pytest.mark.parametrize(
    ("model", "loss"),
    [(Caching, lambda y, _: y.sum()), (Plain, caching_loss)],
    ids=["forward", "loss"],
)
def test_code_that_remembers_tensors_has_none_after_a_plan(
    model: type[nn.Module],
    loss: Callable[..., torch.Tensor],
    run: Callable[..., object],
) -> None:
    before = str(remembered())
    run(model(), gpu="t4", batch=torch.zeros(2, 4), loss=loss)
    assert str(remembered()) == before
    assert "tensor" not in before.lower()


def test_an_error_leaves_none_behind_either() -> None:
    def fails(output: torch.Tensor, _: object) -> torch.Tensor:
        raise KeyError(str(caching_loss(output, _).dim()))

    before = str(remembered())
    with pytest.raises(BudgetfitError, match="KeyError"):
        budgetfit.estimate(Plain(), gpu="t4", batch=torch.zeros(2, 4), loss=fails)
    assert str(remembered()) == before


def test_what_was_remembered_before_stays() -> None:
    kept = TABLE.setdefault(7, torch.zeros(1))
    budgetfit.estimate(Caching(), gpu="t4", batch=torch.zeros(2, 4))
    assert list(TABLE) == [7]
    assert TABLE.pop(7) is kept


def test_objects_in_a_circle_are_looked_at_once() -> None:
    circle: list[Any] = [Helper()]
    circle.append(circle)
    with user_state_preserved(circle):
        circle.append(in_a_table())
    assert len(circle) == 2
    assert not TABLE


def test_what_only_modules_that_never_run_lead_to_is_left_out() -> None:
    kept, left_out = Plain(), Plain()
    kept.held, left_out.held = [1], [2]
    with user_state_preserved(nn.Sequential(kept, left_out), never_run=[left_out]):
        kept.held.append(3)
        left_out.held.append(3)
    assert (kept.held, left_out.held) == ([1], [2, 3])
