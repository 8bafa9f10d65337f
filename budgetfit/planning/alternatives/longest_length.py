"""The longest samples that fit, found with as few plans as possible."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from budgetfit.batches.batch_tree import describe_batch
from budgetfit.errors import DoesNotFitError, InputError
from budgetfit.example_batches.make_batch import most_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.plan import Estimate, Plan
    from budgetfit.workload.workload import Subject

FIRST: Final = 1024  # tokens that are tried first: what a made batch has unasked
# Up to each length in multiples of its step; longer ones in multiples of the last.
STEPS: Final = ((128, 8), (1024, 16))
LAST_STEP: Final = 128
WORTH_TELLING: Final = 0.01
_GROWTH: Final = 4  # from try to try, where nothing says how far there is to go
_GUESSES: Final = 8  # after so many what is needed is no guide: the rest goes by halves


# Where neither the model nor the user names a limit; few look for more.
NO_LIMIT: Final = 2**17


class Need(NamedTuple):
    """What a length needs, at least; ``limit_bytes`` are usable.

    ``fits`` says it where bytes alone do not: the allocator may have had to retry.
    ``estimate`` is of what needs so much, where one was made.
    """

    needed_bytes: int
    limit_bytes: int
    fits: bool
    estimate: Estimate | None = None


def lengths_up_to(longest: int) -> list[int]:
    """Return the lengths that are looked at: multiples of 128, finer ones below 1024.

    ``longest`` is always among them.
    """
    found: list[int] = []
    below = 0
    for last, step in (*STEPS, (longest, LAST_STEP)):
        found += range(below + step, min(last, longest) + 1, step)
        below = max(below, last)
    return found if found and found[-1] == longest else [*found, longest]


def at_distances(lengths: Sequence[int]) -> list[int]:
    """Return the lengths that are worth telling apart, in ascending order.

    >>> at_distances([1024, 1152, 131072, 131200, 133248])
    [1024, 1152, 131072, 133248]
    """
    found: list[int] = []
    for length in lengths:
        if not found or length >= found[-1] * (1 + WORTH_TELLING):
            found.append(length)
    return found


def lengths_of(subject: Subject, longest: int | None = None) -> list[int]:
    """Return the lengths of samples that a subject can be trained on.

    Of a model that reads images too, those that leave room for one.

    Args:
        subject: Its batch is a made one, of a usual length.
        longest: Of interest; None for the positions that the model has.

    Raises:
        InputError: If ``max_length`` decides nothing about its batch.
    """
    if longest is None:
        longest = most_positions(subject.model) or NO_LIMIT
    lengths = lengths_up_to(longest)
    usual = describe_batch(subject.batch)

    def shapes(length: int) -> dict[str, tuple[tuple[int, ...], str]]:
        try:
            return describe_batch(subject.at_length(length).batch)
        except InputError:  # it has no room for an image of the size asked for
            return {}

    def is_whole(length: int) -> bool:
        """Whether a row of so many tokens holds all that the usual one does."""
        there = shapes(length)
        return there.keys() == usual.keys() and any(
            length in shape for shape, _ in there.values()
        )

    if subject.remake is None or (len(lengths) > 1 and shapes(lengths[0]) == usual):
        raise InputError(
            f"No length decides about the samples of {subject.name}: its batch was "
            'given or holds no text. Use another objective, for example "throughput".'
        )
    return lengths[bisect_left(lengths, x=True, key=is_whole) :] or lengths


def longest_that_fits(
    need_at: Callable[[int], Need],
    lengths: Sequence[int],
    *,
    known: Sequence[tuple[int, Need]] = (),
) -> int | None:
    """Return the longest of ``lengths`` that fits; the next one does not.

    Memory grows about linearly or quadratically with the length, so what is needed at
    the lengths that were tried says where the limit is met: about four tries, where a
    search by halves takes ten.

    Args:
        need_at: What a length needs; called once for each length that is tried.
        lengths: In ascending order.
        known: What other lengths need, which need not be among ``lengths``. Without
            any, the usual length is tried first.

    Returns:
        None where not even the shortest fits.
    """
    low, high = -1, len(lengths)  # the longest that fits, the shortest that does not
    points = list(known)
    at = _guess(points, lengths) if points else _at_most(lengths, FIRST)
    at = min(max(at, 0), high - 1)
    while high - low > 1:
        need = need_at(lengths[at])
        points.append((lengths[at], need))
        low, high = (at, high) if need.fits else (low, at)
        if len(points) > _GUESSES:
            at = (low + high) // 2
        elif low < 0:
            at = 0 if len(points) == 1 else _guess(points, lengths)
        elif all(need.fits for _, need in points):
            at = _further(points, lengths)
        else:
            at = _guess(points, lengths)
        at = min(max(at, low + 1), high - 1)
    return lengths[low] if low >= 0 else None


def _further(points: list[tuple[int, Need]], lengths: Sequence[int]) -> int:
    """Return where to look when all that was tried fits."""
    wanted = _crossing(points[-2:])
    if wanted is None:
        return _at_most(lengths, _GROWTH * points[-1][0])
    return _at_most(lengths, wanted) + 1  # it should fail: then the end is known


def _guess(points: list[tuple[int, Need]], lengths: Sequence[int]) -> int:
    """Return where the limit is met, as the nearest points say; the lowest where none.

    Three points make a curve; two, or three that bend back, a line.
    """
    nearest = sorted(points, key=lambda point: abs(_excess(point)))[:3]
    for count in (3, 2):
        length = _crossing(sorted(nearest[:count]))
        if length is not None:
            return _at_most(lengths, length)
    return 0


def _crossing(points: Sequence[tuple[int, Need]]) -> float | None:
    """Return at which length the excess is 0, on the line or parabola through points.

    None where the excess does not grow from point to point.
    """
    excess = [_excess(point) for point in points]
    if len(points) < 2 or any(b <= a for a, b in pairwise(excess)):  # noqa: PLR2004
        return None
    lengths = [length for length, _ in points]
    slopes = [
        (excess[i + 1] - excess[i]) / (lengths[i + 1] - lengths[i])
        for i in range(len(points) - 1)
    ]
    bend = (slopes[-1] - slopes[0]) / (lengths[-1] - lengths[0])
    # excess = a + slope * x + bend * x * x, with x counted from the first point
    slope = slopes[0] - bend * (lengths[1] - lengths[0])
    root = slope**2 - 4 * bend * excess[0]
    if root < 0 or slope + math.sqrt(root) <= 0:
        return None
    return lengths[0] - 2 * excess[0] / (slope + math.sqrt(root))


def _excess(point: tuple[int, Need]) -> int:
    return point[1].needed_bytes - point[1].limit_bytes


def _at_most(lengths: Sequence[int], length: float) -> int:
    """Return the place of the longest of ``lengths`` that is not above ``length``."""
    return bisect_right(lengths, length) - 1


def longest_plan(
    plan_at: Callable[[int], Plan],
    need_at: Callable[[int], Need],
    lengths: Sequence[int],
) -> tuple[int, Plan]:
    """Return the longest of ``lengths`` that fits, and the plan for it.

    Args:
        plan_at: A whole plan for samples of a length; called once, unless what was
            needed at least turns out not to be enough.
        need_at: As for ``longest_that_fits``.
        lengths: In ascending order.

    Raises:
        DoesNotFitError: Not even the shortest fits; as ``plan_at`` tells it.
    """
    known: dict[int, Need] = {}

    def need(length: int) -> Need:
        if length not in known:
            known[length] = need_at(length)
        return known[length]

    while True:
        found = longest_that_fits(need, lengths)
        length = lengths[0] if found is None else found
        try:
            return length, plan_at(length)
        except DoesNotFitError:
            lengths = lengths[: bisect_left(lengths, length)]
            if not lengths:
                raise
