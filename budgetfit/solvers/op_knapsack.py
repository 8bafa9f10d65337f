"""Op sets for selective checkpointing, by a knapsack of op outputs.

Selective checkpointing saves some ops' outputs and recomputes the others. Each set is a
point: the bytes that it holds and the time that it saves. There are many blocks of one
type, and each can use another set, so that the convex hull of these points counts: half
of the blocks with one set and half with another lie between the two.

The hull needs no search: its corners are the items taken in order of time saved per
byte, best first (the greedy solution of the fractional knapsack, Dantzig 1957). That is
exact in integers; a knapsack with rounded weights is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from budgetfit.errors import InputError

MAX_COMPARED_POINTS = 256  # choosing among them takes quadratic time


@dataclass(frozen=True, slots=True, kw_only=True)
class OpItem:
    """An op whose output could be saved.

    Attributes:
        saved_bytes: Bytes of its output, held until the backward pass.
        saved_ns: Recomputation time saved.
        group: Items of one group are saved together or not at all, such as ops that
            draw from one random generator; None for a single item.
    """

    saved_bytes: int
    saved_ns: int
    group: int | None = None


class _Point(NamedTuple):
    bytes: int
    ns: int


def pareto_op_sets(items: Sequence[OpItem], most: int) -> tuple[tuple[int, ...], ...]:
    """Return at most ``most`` sets of items on the convex hull.

    Each is a tuple of positions in ``items``, ascending; the sets hold more and more
    bytes and are spread along the hull. The empty set, plain recomputation, is left
    out. The set that saves all the time is included unless it takes more than half of
    all bytes, which is nearly keeping the block. ``items``: in the order of execution.

    Raises:
        InputError: ``most`` is negative, or an item's bytes or time are.
    """
    if most < 0 or any(min(each.saved_bytes, each.saved_ns) < 0 for each in items):
        raise InputError("Bytes, times and the number of op sets cannot be negative.")
    bundles = sorted(
        (each for each in _bundles(items) if _point(items, each).ns),
        key=lambda bundle: (_bytes_per_ns(_point(items, bundle)), bundle),
    )
    points = [_Point(0, 0)]
    for bundle in bundles:
        more = _point(items, bundle)
        points.append(_Point(points[-1].bytes + more.bytes, points[-1].ns + more.ns))
    last = len(bundles)
    whole = 2 * points[last].bytes <= sum(each.saved_bytes for each in items)
    ends = (last,) if whole and last and most else ()
    # A loop over time steps gives thousands of close points.
    some = [*range(0, last, -(-last // MAX_COMPARED_POINTS) or 1), last]
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


def _bytes_per_ns(point: _Point) -> Fraction:
    """Return bytes per nanosecond saved."""
    return Fraction(point.bytes, point.ns)


def _spread(points: Sequence[_Point], most: int) -> tuple[int, ...]:
    """Return at most ``most`` of the points between the first and the last."""
    # Where a budget falls between two sets, the bytes above the smaller one stay unused
    # and the larger one's time is lost: minimises the sum of these rectangles.
    last = len(points) - 1
    if most >= last - 1:  # each makes the sum less, but for sets without any bytes
        return tuple(n for n in range(1, last) if points[n + 1].bytes)
    # best[end]: (sum up to there, chosen points), for one more point in each round.
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
