"""Which op outputs of a block are worth saving: a few sets, from little to much.

Selective checkpointing saves some ops' outputs and runs the others again. Each set is a
point: the bytes that it holds and the time that it saves. Blocks of one type are many,
and each can take another set, so what counts is the convex hull of these points: half
of the blocks with one set and half with another land between the two.

The hull needs no search. The points are sums over items that are in or out, and the
corners of such a set of sums are the items taken in order of time saved per byte,
best first (Dantzig 1957; the front of a knapsack touches its relaxation there). That
is exact in integers; a rounded knapsack is not, see solver-facts 2.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from budgetfit.errors import InputError

MOST_COMPARED = 256  # points; choosing among them takes the square of their number


@dataclass(frozen=True, slots=True, kw_only=True)
class OpItem:
    """An op whose output could be saved.

    Attributes:
        saved_bytes: What its output holds until the backward pass.
        saved_ns: Time that need not be spent again once it is saved.
        group: Items of one number are saved together or not at all, as ops are that
            draw from one random generator; None for an item by itself.
    """

    saved_bytes: int
    saved_ns: int
    group: int | None = None


class _Point(NamedTuple):
    bytes: int
    ns: int


def pareto_op_sets(items: Sequence[OpItem], most: int) -> tuple[tuple[int, ...], ...]:
    """Return at most ``most`` sets of items that no mix of other sets beats.

    Each is a tuple of positions in ``items``, ascending; the sets hold more and more
    bytes and are spread along the hull. Never among them is the empty set, which is
    plain recomputation. The set that saves all the time always is, unless it takes more
    than half of all bytes, which is nearly keeping the block.

    Args:
        items: The candidates, in the order of execution.
        most: Most sets to return.

    Raises:
        InputError: ``most`` is negative, or an item's bytes or time are.
    """
    if most < 0 or any(min(each.saved_bytes, each.saved_ns) < 0 for each in items):
        raise InputError("Bytes, times and the number of op sets cannot be negative.")
    bundles = sorted(
        (each for each in _bundles(items) if _point(items, each).ns),
        key=lambda bundle: (_price(_point(items, bundle)), bundle),
    )
    points = [_Point(0, 0)]
    for bundle in bundles:
        more = _point(items, bundle)
        points.append(_Point(points[-1].bytes + more.bytes, points[-1].ns + more.ns))
    last = len(bundles)
    whole = 2 * points[last].bytes <= sum(each.saved_bytes for each in items)
    ends = (last,) if whole and last and most else ()
    # A loop over time leaves thousands of points, one beside the other.
    some = [*range(0, last, -(-last // MOST_COMPARED) or 1), last]
    spread = _spread([points[number] for number in some], most - len(ends))
    chosen = (*(some[number] for number in spread), *ends)
    return tuple(
        tuple(sorted(number for bundle in bundles[:count] for number in bundle))
        for count in chosen
    )


def _bundles(items: Sequence[OpItem]) -> list[tuple[int, ...]]:
    """Return the positions of the items, those of one group together."""
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for number, item in enumerate(items):
        key = ("item", number) if item.group is None else ("group", item.group)
        found[key] = (*found.get(key, ()), number)
    return list(found.values())


def _point(items: Sequence[OpItem], chosen: Sequence[int]) -> _Point:
    return _Point(
        sum(items[number].saved_bytes for number in chosen),
        sum(items[number].saved_ns for number in chosen),
    )


def _price(point: _Point) -> Fraction:
    """Return bytes per nanosecond saved."""
    return Fraction(point.bytes, point.ns)


def _spread(points: Sequence[_Point], most: int) -> tuple[int, ...]:
    """Return at most ``most`` of the points between the first and the last.

    Where a budget falls between two sets, the bytes above the smaller one stay unused
    and the larger one's time is lost: the sum of these rectangles is made small.
    """
    last = len(points) - 1
    # best[end]: that sum up to there, and the points passed, for ever more of these.
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        end: (_lost(points[0], points[end]), ()) for end in range(1, last + 1)
    }
    for _ in range(most):
        better = dict(best)
        for end in best:
            for middle in range(1, end):
                lost, passed = best[middle]
                lost += _lost(points[middle], points[end])
                better[end] = min(better[end], (lost, (*passed, middle)))
        best = better
    return best[last][1] if last else ()


def _lost(one: _Point, other: _Point) -> int:
    return (other.bytes - one.bytes) * (other.ns - one.ns)
