"""The longest sequence length that fits, found with as few plans as possible."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from budgetfit.batches.batch_tree import describe_batch
from budgetfit.core.plan import Plan
from budgetfit.errors import DoesNotFitError, InputError
from budgetfit.example_batches.make_batch import max_positions
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    from budgetfit.planning.search.lowest_peak import LowestPeak

FIRST_LENGTH: Final = 1024  # tokens, tried first: the default of a made batch
# (length, step): multiples of the step up to the length; beyond, of the last step.
LENGTH_STEPS: Final = ((128, 8), (1024, 16))
LAST_LENGTH_STEP: Final = 128
MIN_RELATIVE_DISTANCE: Final = 0.01
_GROWTH: Final = 4  # from try to try, while there is no estimate of the limit
_GUESSES: Final = 8  # after so many tries interpolation gives way to bisection

# Where neither the model nor the user names a limit.
DEFAULT_LONGEST: Final = 2**17


def candidate_lengths(longest: int) -> list[int]:
    """Return lengths to try: multiples of 128, finer below 1024; and ``longest``."""
    found: list[int] = []
    below = 0
    for last, step in (*LENGTH_STEPS, (longest, LAST_LENGTH_STEP)):
        found += range(below + step, min(last, longest) + 1, step)
        below = max(below, last)
    return found if found and found[-1] == longest else [*found, longest]


def thinned_lengths(lengths: Sequence[int]) -> list[int]:
    """Return ascending lengths that differ by at least 1 %.

    >>> thinned_lengths([1024, 1152, 131072, 131200, 133248])
    [1024, 1152, 131072, 133248]
    """
    found: list[int] = []
    for length in lengths:
        if not found or length >= found[-1] * (1 + MIN_RELATIVE_DISTANCE):
            found.append(length)
    return found


def trainable_lengths(workload: Workload, longest: int | None = None) -> list[int]:
    """Return the sequence lengths that a workload can be trained on.

    Of a multimodal model, those that leave room for an image.

    Args:
        workload: Its batch is a made one, of the default length.
        longest: The longest to return; None for the model's position limit.

    Raises:
        InputError: If ``max_length`` does not affect its batch.
    """
    if longest is None:
        longest = max_positions(workload.model) or DEFAULT_LONGEST
    lengths = candidate_lengths(longest)
    usual = describe_batch(workload.batch)

    def shapes(length: int) -> dict[str, tuple[tuple[int, ...], str]]:
        try:
            return describe_batch(workload.at_length(length).batch)
        except InputError:  # no room for an image of the requested size
            return {}

    def is_whole(length: int) -> bool:
        """Whether the batch has the default one's inputs, and this many tokens."""
        there = shapes(length)
        return there.keys() == usual.keys() and any(
            length in shape for shape, _ in there.values()
        )

    if (
        workload.remake is None
        or not shapes(lengths[-1])
        or (len(lengths) > 1 and shapes(lengths[0]) == usual)
    ):
        raise InputError(
            f"No length decides about the samples of {workload.name}: its batch was "
            'given or holds no text. Use another objective, for example "throughput".'
        )
    return lengths[bisect_left(lengths, x=True, key=is_whole) :] or lengths


def longest_that_fits(
    need_at: Callable[[int], LowestPeak],
    lengths: Sequence[int],
    *,
    known: Sequence[tuple[int, LowestPeak]] = (),
) -> int | None:
    """Return the longest of ``lengths`` that fits; the next one does not.

    Memory grows about linearly or quadratically with the length, so that interpolation
    of the needs finds the limit in about four tries, where bisection takes ten.

    Args:
        need_at: The need at a length; called once for each length that is tried.
        lengths: In ascending order.
        known: Needs at other lengths, which need not be among ``lengths``. Without any,
            the default length is tried first.

    Returns:
        None where not even the shortest fits.
    """
    low, high = -1, len(lengths)  # the longest that fits, the shortest that does not
    points = list(known)
    at = _guess(points, lengths) if points else _at_most(lengths, FIRST_LENGTH)
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


def _further(points: list[tuple[int, LowestPeak]], lengths: Sequence[int]) -> int:
    """Return the index to try next when all tried lengths fit."""
    wanted = _crossing(points[-2:])
    if wanted is None:
        return _at_most(lengths, _GROWTH * points[-1][0])
    return _at_most(lengths, wanted) + 1  # should not fit: an upper bound


def _guess(points: list[tuple[int, LowestPeak]], lengths: Sequence[int]) -> int:
    """Return the index where the nearest points meet the limit; 0 if they do not."""
    # Three points give a parabola; two, or three that are not monotonic, a line.
    nearest = sorted(points, key=lambda point: abs(_excess(point)))[:3]
    for count in (3, 2):
        length = _crossing(sorted(nearest[:count]))
        if length is not None:
            return _at_most(lengths, length)
    return 0


def _crossing(points: Sequence[tuple[int, LowestPeak]]) -> float | None:
    """Return the length of zero excess, on the line or parabola through points."""
    # None where the excess does not grow from point to point.
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


def _excess(point: tuple[int, LowestPeak]) -> int:
    return point[1].needed_bytes - point[1].limit_bytes


def _at_most(lengths: Sequence[int], length: float) -> int:
    """Return the index of the longest of ``lengths`` that is not above ``length``."""
    return bisect_right(lengths, length) - 1


def longest_plan(
    plan_at: Callable[[int], Plan],
    need_at: Callable[[int], LowestPeak],
    lengths: Sequence[int],
) -> tuple[int, Plan]:
    """Return the longest of ``lengths`` that fits, and the plan for it.

    Args:
        plan_at: A whole plan at a length; called once, unless the plan needs more than
            ``need_at`` has found.
        need_at: As for ``longest_that_fits``.
        lengths: In ascending order.

    Raises:
        DoesNotFitError: Not even the shortest fits; raised by ``plan_at``.
    """
    known: dict[int, LowestPeak] = {}

    def need(length: int) -> LowestPeak:
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
