"""The longest length that fits, on curves whose answer is known."""

import random
from bisect import bisect_right
from collections.abc import Callable

import pytest

from budgetfit.core.plan import Plan
from budgetfit.errors import DoesNotFitError
from budgetfit.planning.alternatives.longest_length import (
    candidate_lengths,
    longest_plan,
    longest_that_fits,
)
from budgetfit.planning.search.lowest_peak import LowestPeak
from tests.reporting.sample_plans import sample_plan

MIB = 2**20


def curve(
    base: float, linear: float, square: float, limit: int, tried: list[int]
) -> Callable[[int], LowestPeak]:
    """Needs of MiB: ``base + linear * length + square * length^2``."""

    def need(length: int) -> LowestPeak:
        tried.append(length)
        needed = round(MIB * (base + linear * length + square * length**2))
        return LowestPeak(needed, limit * MIB, needed <= limit * MIB)

    return need


def test_lengths_are_multiples_of_128_and_finer_below_1024() -> None:
    assert candidate_lengths(20) == [8, 16, 20]
    assert candidate_lengths(160) == [*range(8, 129, 8), 144, 160]
    assert candidate_lengths(1300)[-4:] == [1024, 1152, 1280, 1300]
    assert candidate_lengths(5) == [5]
    for longest in (1, 7, 8, 128, 514, 1024, 131_072):
        found = candidate_lengths(longest)
        assert found[-1] == longest
        assert found == sorted(set(found))


@pytest.mark.parametrize(
    ("base", "linear", "square", "limit", "answer", "most"),
    [
        (4000, 1.7, 0, 23_000, 11_136, 5),  # 19000 / 1.7 = 11176
        (4000, 1.7, 0, 1_000_000, 131_072, 3),  # all that there is
        (4000, 1.7, 0, 4500, 288, 6),  # 500 / 1.7 = 294
        (4000, 1.7, 0, 4001, None, 2),
        (4000, 0.5, 0.001, 23_000, 4096, 6),  # 4116
    ],
)
def test_a_worked_example(
    base: float, linear: float, square: float, limit: int, answer: int | None, most: int
) -> None:
    tried: list[int] = []
    need = curve(base, linear, square, limit, tried)
    assert longest_that_fits(need, candidate_lengths(131_072)) == answer
    assert len(tried) <= most


def test_what_is_known_of_other_lengths_saves_tries() -> None:
    tried: list[int] = []
    need = curve(4000, 1.7, 0, 23_000, tried)
    lengths = [n for n in candidate_lengths(131_072) if n < 65_536]
    known = [(0, need(0)), (65_536, need(65_536))]
    tried.clear()
    assert longest_that_fits(need, lengths, known=known) == 11_136
    assert len(tried) == 2  # it, and the next
    assert longest_that_fits(need, lengths[:1], known=known) == 8


def test_lines_and_parabolas_take_few_tries() -> None:
    rng = random.Random(0)
    counts = []
    for _ in range(500):
        lengths = candidate_lengths(2 ** rng.randint(4, 17))
        tried: list[int] = []
        limit = rng.randint(4000, 80_000)
        base, linear = rng.uniform(500, 90_000), rng.uniform(0.05, 8)
        square = rng.choice([0, 0, 10 ** rng.uniform(-6, -2)])
        found = longest_that_fits(curve(base, linear, square, limit, tried), lengths)
        check = curve(base, linear, square, limit, [])
        assert found == max((n for n in lengths if check(n).fits), default=None)
        assert len(tried) == len(set(tried))
        counts.append(len(tried))
    assert max(counts) <= 6
    assert sum(counts) / len(counts) < 4


def test_any_monotone_need_is_answered_whatever_its_bytes_say() -> None:
    """Bytes only guide: steps, plateaus and nonsense cost tries and no more."""
    rng = random.Random(1)
    lengths = candidate_lengths(16_384)
    for _ in range(300):
        longest = rng.choice([0, *lengths])
        kind = rng.randrange(3)
        tried: list[int] = []

        def need(
            length: int,
            longest: int = longest,
            kind: int = kind,
            seen: list[int] = tried,
        ) -> LowestPeak:
            seen.append(length)
            fits = length <= longest
            told = (7 if fits else 9, rng.randrange(100), 100 - length)[kind]
            return LowestPeak(told, 8, fits)

        assert longest_that_fits(need, lengths) == (longest or None)
        assert len(tried) == len(set(tried))
        assert len(tried) <= 9 + len(lengths).bit_length()


def no_fit() -> DoesNotFitError:
    return DoesNotFitError(
        needed_bytes=2 * MIB, usable_bytes=MIB, largest=("parameters", MIB)
    )


def test_the_plan_is_made_once_at_the_length_that_was_found() -> None:
    planned: list[int] = []

    def plan_at(length: int) -> Plan:
        planned.append(length)
        return sample_plan()

    need = curve(4000, 1.7, 0, 23_000, [])
    length, plan = longest_plan(plan_at, need, candidate_lengths(131_072))
    assert (length, planned) == (11_136, [11_136])
    assert plan == sample_plan()


def test_a_plan_that_needs_more_than_the_least_is_made_for_shorter_samples() -> None:
    lengths = candidate_lengths(131_072)
    planned: list[int] = []

    def plan_at(length: int) -> Plan:
        planned.append(length)
        if length > 10_900:
            raise no_fit()
        return sample_plan()

    tried: list[int] = []
    need = curve(4000, 1.7, 0, 23_000, tried)
    length, _ = longest_plan(plan_at, need, lengths)
    assert length == lengths[bisect_right(lengths, 10_900) - 1] == 10_880
    assert planned == [11_136, 11_008, 10_880]
    assert len(tried) == len(set(tried))


def test_where_nothing_fits_the_error_is_that_of_the_shortest() -> None:
    def plan_at(length: int) -> Plan:
        assert length == 8
        raise no_fit()

    with pytest.raises(DoesNotFitError, match=r"found is 2 MiB"):
        longest_plan(plan_at, curve(4000, 1.7, 0, 4001, []), candidate_lengths(512))
