"""Bounds from prices: what a plan must take if bytes cost time (Lagrange).

Of all points at which bytes must suffice, one is looked at: where the last block runs,
or the one before it. Its limit is lifted, and every byte held there costs a price
instead. The cheapest plan is then a shortest path over the steps, and what it costs,
less the price of what is available, is a time that no plan within the budget can beat,
whatever the price. The best price is found in a few walks, for paths change at few
prices only (Everett 1963, Fisher 1981).

Two of those paths, one too large and one that is not, also make a plan: blocks up to
some block as in the smaller one, the rest as in the other. Recomputing the first blocks
and keeping the last is the best order (solver S4), so that this plan is at most about a
block's time from the bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.solvers.labels import Labels, available_bytes, optimizer_need
from budgetfit.solvers.pareto import Ints
from budgetfit.solvers.problem import Problem, Same
from budgetfit.solvers.transitions import ChainStep, Steps, steps_of

Floats = NDArray[np.float64]

# Larger than the time of any plan, and added to a few times without overflow.
NEVER: Final = 2**60
# Prices are floats: what their rounding may add to a bound, as a share of its parts.
_ROUNDING: Final = 1e-12


class _Path(NamedTuple):
    """A way through the chain: its extra time, and its bytes at the point."""

    time_ns: int
    held_bytes: int
    steps: tuple[ChainStep, ...]


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Bounds on the extra time of the fastest plan within a budget.

    Attributes:
        least_ns: No plan takes less; ``NEVER`` if there is none.
        most_ns: The fastest one takes no more; ``NEVER`` if none was found.
        plan: The one that takes ``most_ns``; empty if none was found.
        available: Bytes above the static ones.
        prices: Nanoseconds that a byte costs, around the best price.
        steps: All steps.
    """

    least_ns: int
    most_ns: int
    plan: tuple[ChainStep, ...]
    available: int
    prices: list[float]
    steps: Steps

    @cached_property
    def _before(self) -> Floats:
        """What the blocks before each one cost at least, by price and block."""
        rows = [
            tuple(
                column.tolist()
                for column in (self.steps.stops(start), numbers[:, 4], numbers[:, 0])
            )
            for start, numbers in enumerate(self.steps.numbers)
        ]
        return np.array([_before(rows, price) for price in self.prices])

    def least_before(self, block: int, labels: Labels) -> Ints:
        """Return the least extra time of the blocks before one, for each label of it.

        What the blocks before leave is at most what the label's backward leaves free.
        """
        room = self.available - labels.backward
        costs = self._before[:, block, None]
        paid = np.array(self.prices)[:, None] * room
        slack = 1 + _ROUNDING * (np.abs(costs) + np.abs(paid))
        least = (costs - paid - slack).max(axis=0)
        found: Ints = np.maximum(np.ceil(least), 0).astype(np.int64)
        return found


def relaxation(problem: Problem) -> Relaxation:
    """Return bounds on the extra time of the fastest plan, in a few milliseconds.

    Those of the last problems are remembered.
    """
    return _remembered(
        Same(problem.chain), problem.budget_bytes, problem.max_segment, problem.nested
    )


@lru_cache(maxsize=64)
def _remembered(
    same: Same,
    budget_bytes: int,
    max_segment: int | None,
    nested: bool,
) -> Relaxation:
    problem = Problem(
        chain=same.chain,
        budget_bytes=budget_bytes,
        max_segment=max_segment,
        nested=nested,
    )
    available = available_bytes(problem)
    steps = steps_of(problem)
    least_ns, most_ns = 0, NEVER
    plan: tuple[ChainStep, ...] = ()
    prices = [0.0]
    last = len(steps) - 1
    for point in (last, last - 1)[: len(steps)]:
        side = _hull(same, max_segment, nested, point).side(available)
        if side is None or optimizer_need(problem) > available:
            return Relaxation(NEVER, NEVER, (), available, [0.0], steps)
        least_ns = max(least_ns, side.least_ns)
        prices += side.prices
        spliced = _spliced(side.fast, side.small, available)
        if spliced is not None and spliced.time_ns < most_ns:
            most_ns, plan = spliced.time_ns, spliced.steps
    return Relaxation(least_ns, most_ns, plan, available, prices, steps)


# Of the steps that start at a block: where they stop, extra times, bytes held.
_Moves = tuple[list[int], list[int], list[int]]


class _Side(NamedTuple):
    """What a limit leads to: the cheapest paths above and below it, and the bound."""

    fast: _Path
    small: _Path
    least_ns: int
    prices: list[float]


class _Hull:
    """The paths that are cheapest at some price, found as they are asked for.

    They do not depend on the budget, which only says between which two it lies.
    """

    def __init__(self, steps: Steps, rows: list[_Moves]) -> None:
        self._steps, self._rows = steps, rows
        # The least time, then the fewest bytes; and the other way round.
        fast = _cheapest(steps, rows, NEVER, 1)
        small = _cheapest(steps, rows, 1, NEVER)
        # By time, and by bytes the other way round.
        self._paths = [fast, small] if small.held_bytes < fast.held_bytes else [fast]
        self._next_to: set[int] = set()  # bytes of paths whose follower is next to them

    def side(self, available: int) -> _Side | None:
        """Return where so many bytes lie; None where every path holds more."""
        paths = self._paths
        if paths[0].held_bytes <= available:
            return _Side(paths[0], paths[0], paths[0].time_ns, [])
        if paths[-1].held_bytes > available:
            return None
        while True:
            at = next(n for n, path in enumerate(paths) if path.held_bytes <= available)
            fast, small = paths[at - 1], paths[at]
            if fast.held_bytes in self._next_to:
                break
            path = _cheapest(self._steps, self._rows, 1, _price(fast, small))
            if small.held_bytes < path.held_bytes < fast.held_bytes:
                paths.insert(at, path)
            else:
                self._next_to.add(fast.held_bytes)
        price = _price(fast, small)
        # No path is below the line between the two: rounding apart.
        saved_ns = (small.time_ns - fast.time_ns) * (small.held_bytes - available)
        least_ns = small.time_ns + saved_ns // (fast.held_bytes - small.held_bytes)
        slack_ns = 1 + _ROUNDING * (small.time_ns + price * fast.held_bytes)
        near = paths[max(0, at - 3) : at + 3]
        prices = [_price(one, other) for one, other in pairwise(near)]
        return _Side(fast, small, least_ns - math.ceil(slack_ns), prices)


def _price(fast: _Path, small: _Path) -> float:
    """Return what a byte must cost for two paths to cost the same."""
    return (small.time_ns - fast.time_ns) / (fast.held_bytes - small.held_bytes)


@lru_cache(maxsize=64)
def _hull(same: Same, max_segment: int | None, nested: bool, point: int) -> _Hull:
    problem = Problem(
        chain=same.chain, budget_bytes=0, max_segment=max_segment, nested=nested
    )
    steps = steps_of(problem)
    return _Hull(steps, [_moves(steps, start, point) for start in range(len(steps))])


def _moves(steps: Steps, start: int, point: int) -> _Moves:
    """Return the steps that start at a block, with what they hold at a point."""
    saved, _, forward, backward, extra_ns, _ = steps.numbers[start].T
    stops = steps.stops(start)
    running = np.maximum(forward, backward) if start <= point else 0
    held = np.where(stops <= point, saved, running)
    return stops.tolist(), extra_ns.tolist(), held.tolist()


def _cheapest(
    steps: Steps, rows: list[_Moves], time_price: float, price: float
) -> _Path:
    """Return the cheapest path; whole prices are exact."""
    cost: list[float] = [0] + [float("inf")] * len(rows)
    best: list[tuple[int, int] | None] = [None] * (len(rows) + 1)
    for start, row in enumerate(rows):
        here = cost[start]
        for index, (stop, time_ns, held) in enumerate(zip(*row, strict=True)):
            there = here + time_price * time_ns + price * held
            if there < cost[stop]:
                cost[stop], best[stop] = there, (start, index)
    total_ns = held_bytes = 0
    chosen = []
    block = len(rows)
    while (arrived := best[block]) is not None:
        block, index = arrived
        _, times_ns, held_by = rows[block]
        total_ns, held_bytes = total_ns + times_ns[index], held_bytes + held_by[index]
        chosen.append(steps.one(block, index))
    return _Path(total_ns, held_bytes, tuple(reversed(chosen)))


def _before(rows: Sequence[_Moves], price: float) -> list[float]:
    """Return the least cost of the blocks before each one: time, and bytes saved."""
    cost = [0.0] + [float("inf")] * len(rows)
    for start, row in enumerate(rows):
        here = cost[start]
        for stop, extra_ns, saved_bytes in zip(*row, strict=True):
            there = here + extra_ns + price * saved_bytes
            cost[stop] = min(cost[stop], there)
    return cost


def _spliced(fast: _Path, small: _Path, available: int) -> _Path | None:
    """Return the smaller path up to some block and the faster from there, if it fits.

    The fewest blocks as in the smaller one that make it fit, by bisection: more blocks
    of it hold less.
    """
    ends = {step.stop for step in fast.steps}
    cuts = [0, *(step.stop for step in small.steps if step.stop in ends)]

    def joined(cut: int) -> tuple[ChainStep, ...]:
        return (
            *(step for step in small.steps if step.stop <= cut),
            *(step for step in fast.steps if step.stop > cut),
        )

    low, high = -1, len(cuts) - 1
    if not _fits(joined(cuts[high]), available):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(joined(cuts[middle]), available):
            high = middle
        else:
            low = middle
    steps = joined(cuts[high])
    return _Path(sum(step.extra_ns for step in steps), 0, steps)


def _fits(steps: Sequence[ChainStep], available: int) -> bool:
    """Whether a plan never has more bytes alive than are available."""
    saved = cached = 0
    for step in steps:
        if saved + max(cached + step.forward_bytes, step.backward_bytes) > available:
            return False
        saved += step.saved_bytes
        cached += step.cached_bytes
    return True
