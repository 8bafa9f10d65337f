"""Planning again and again leaves nothing behind; ``run.py`` does it 200 times."""

from collections.abc import Callable

import pytest

from budgetfit.tracing.call_cache import MAX_CACHED_CALLS, CallCache
from tests.leaks.process import held, memory
from tests.leaks.work import WORK


@pytest.mark.parametrize("piece", WORK, ids=lambda piece: piece.__name__)
@pytest.mark.filterwarnings("ignore")  # of optimizers that step on one weight
def test_the_third_time_leaves_what_the_second_left(
    piece: Callable[[int], None],
) -> None:
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
    calls: CallCache[int] = CallCache()
    for number in range(MAX_CACHED_CALLS + 10):
        calls.store((number,), number)
    assert len(calls) <= MAX_CACHED_CALLS


@pytest.mark.skipif(not memory(), reason="needs Linux's /proc")
def test_memory_that_is_kept_is_seen_and_what_is_free_is_not() -> None:
    before = memory()["private"]
    many = [bytes([number % 251]) * 4000 for number in range(10_000)]
    kept = memory()["private"]
    del many
    assert kept - before > 35e6  # of 40
    assert memory()["private"] - before < 5e6
