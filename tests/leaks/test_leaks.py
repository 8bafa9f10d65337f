"""Planning again and again leaves nothing behind; ``run.py`` does it 200 times."""

from __future__ import annotations

import pytest

from budgetfit.tracing.op_calls import MOST_CALLS, Calls
from tests.leaks.process import held
from tests.leaks.work import WORK


@pytest.mark.parametrize("piece", WORK, ids=lambda piece: piece.__name__)
@pytest.mark.filterwarnings("ignore")  # of optimizers that step on one weight
def test_the_third_time_leaves_what_the_second_left(piece) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    for number in range(2):
        piece(number)
    before = held()
    piece(0)
    piece(1)

    after = held()
    assert {name: (before[name], after[name]) for name in before} == {
        name: (before[name], min(before[name], after[name])) for name in before
    }


def test_what_is_remembered_of_calls_has_a_bound() -> None:
    calls: Calls[int] = Calls()
    for number in range(MOST_CALLS + 10):
        calls.keep((number,), number)

    assert len(calls) <= MOST_CALLS
