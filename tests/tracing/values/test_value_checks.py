"""Checks of values that only raise an error do not end a trace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import StepTrace
from budgetfit.errors import TraceError
from budgetfit.gpus.table import find_gpu
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload

WIDTH = 64


class Checked(nn.Module):
    def __init__(self, rest: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.rest = rest

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x, self.layer(x)).mean()


def trace(rest: Callable[[Tensor, Tensor], Tensor]) -> StepTrace:
    workload = Workload(
        model=Checked(rest), batch=torch.randn(2, WIDTH), gpu=find_gpu("t4")
    )
    return TraceSession(workload).exact(Recipe(batch_size=2))


def _raises(_: Tensor, y: Tensor) -> Tensor:
    if (y < 0).any():
        raise ValueError("negative")
    return y


def _asserts(_: Tensor, y: Tensor) -> Tensor:
    assert not (y < 0).any()
    return y


def _both(x: Tensor, y: Tensor) -> Tensor:
    return _raises(x, y) + _asserts(x, y)


def _gaussian(x: Tensor, y: Tensor) -> Tensor:
    return functional.gaussian_nll_loss(y, x, y.exp())


def _in_two_parts(_: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    return torch.cat([y[mask], y[~mask]]).view(y.shape)


@pytest.mark.parametrize("rest", [_in_two_parts, _raises, _asserts, _both, _gaussian])
def test_an_answer_with_which_a_program_fails_is_not_given_again(
    rest: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert trace(rest).events.size


def test_other_questions_keep_their_yes() -> None:
    """With a yes the masked rows are computed: an upper bound."""

    def masked(_: Tensor, y: Tensor) -> Tensor:
        mask = y < 0
        return torch.where(mask, y.exp(), y) if mask.any() else y

    assert trace(masked).events.size > trace(lambda _, y: y).events.size


def test_an_error_behind_a_question_is_told() -> None:
    def wrong(_: Tensor, y: Tensor) -> Tensor:
        return y.nonsense() if (y < 0).any() else y

    with pytest.raises(TraceError, match="no attribute 'nonsense'"):
        trace(wrong)


def test_a_check_that_raises_for_both_answers_is_told() -> None:
    def never(_: Tensor, y: Tensor) -> Tensor:
        if (y < 0).any():
            raise ValueError("negative")
        raise ValueError("positive")

    with pytest.raises(TraceError, match="ValueError: positive"):
        trace(never)
