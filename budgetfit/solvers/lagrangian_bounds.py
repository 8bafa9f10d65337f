"""Bounds on the fastest plan's time by Lagrangian relaxation of one memory constraint.

Only the constraint at one point is considered: where the last block runs, or the one
before it. A multiplier (time per byte) replaces it. The cheapest plan is then a
shortest path over the steps, and its cost, less the multiplier times the available
bytes, is a lower bound for any multiplier. The best multiplier is found with a few
shortest paths, because paths change at few multipliers only (Everett 1963, Fisher
1981).

Two of those paths, one too large and one not, also make a plan: the first blocks as in
the smaller one, the rest as in the other. Recomputing the first blocks and keeping the
last is the best order, so that this plan is at most about a block's time from the
bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.solvers.labels import Labels, available_bytes, optimizer_need
from budgetfit.solvers.pareto import Ints
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.transitions import ChainStep, Steps, worthwhile_steps

Floats = NDArray[np.float64]

# Larger than the time of any plan; a few of them add up without overflow.
INFEASIBLE_NS: Final = 2**60
# Relative rounding error of bounds: multipliers are floats.
_ROUNDING: Final = 1e-12


class _Path(NamedTuple):
    """A path through the chain: its extra time, and its bytes at the point."""

    time_ns: int
    held_bytes: int
    steps: tuple[ChainStep, ...]


@dataclass(frozen=True, eq=False)
class LagrangianBounds:
    """Bounds on the extra time of the fastest plan within a budget.

    Attributes:
        lower_ns: No plan takes less; ``INFEASIBLE_NS`` if no plan exists.
        upper_ns: The fastest one takes no more; ``INFEASIBLE_NS`` if none was found.
        plan: The one that takes ``upper_ns``; empty if none was found.
        available: Bytes above the static ones.
        multipliers: Nanoseconds per byte, around the best multiplier.
        steps: All steps.
    """

    lower_ns: int
    upper_ns: int
    plan: tuple[ChainStep, ...]
    available: int
    multipliers: list[float]
    steps: Steps

    @cached_property
    def _before(self) -> Floats:
        """Least cost of the blocks before each one, by multiplier and block."""
        rows = [
            tuple(
                column.tolist()
                for column in (self.steps.stops(start), numbers[:, 4], numbers[:, 0])
            )
            for start, numbers in enumerate(self.steps.numbers)
        ]
        return np.array([_before(rows, multiplier) for multiplier in self.multipliers])

    def least_before(self, block: int, labels: Labels) -> Ints:
        """Return a lower bound on the extra time of the blocks before each label."""
        # The blocks before may save at most what the label's backward leaves free.
        room = self.available - labels.backward
        costs = self._before[:, block, None]
        paid = np.array(self.multipliers)[:, None] * room
        slack = 1 + _ROUNDING * (np.abs(costs) + np.abs(paid))
        least = (costs - paid - slack).max(axis=0)
        found: Ints = np.maximum(np.ceil(least), 0).astype(np.int64)
        return found


@lru_cache(maxsize=64)
def lagrangian_bounds(problem: Problem) -> LagrangianBounds:
    """Return bounds on the extra time of the fastest plan; takes a few milliseconds."""
    available = available_bytes(problem)
    steps = worthwhile_steps(problem)
    lower_ns, upper_ns = 0, INFEASIBLE_NS
    plan: tuple[ChainStep, ...] = ()
    multipliers = [0.0]
    last = len(steps) - 1
    for point in (last, last - 1)[: len(steps)]:
        side = _hull(replace(problem, limit_bytes=0), point).side(available)
        if side is None or optimizer_need(problem) > available:
            return LagrangianBounds(
                INFEASIBLE_NS, INFEASIBLE_NS, (), available, [0.0], steps
            )
        lower_ns = max(lower_ns, side.lower_ns)
        multipliers += side.multipliers
        joined = _joined_paths(side.fast, side.small, available)
        if joined is not None and joined.time_ns < upper_ns:
            upper_ns, plan = joined.time_ns, joined.steps
    return LagrangianBounds(lower_ns, upper_ns, plan, available, multipliers, steps)


# The steps that start at a block: their stops, extra times, bytes held.
_Moves = tuple[list[int], list[int], list[int]]


class _HullSection(NamedTuple):
    """The paths of the hull around a limit, and the lower bound there."""

    fast: _Path
    small: _Path
    lower_ns: int
    multipliers: list[float]


class _Hull:
    """The paths that are cheapest at some multiplier, found on demand.

    They do not depend on the budget, which only selects two of them.
    """

    def __init__(self, steps: Steps, rows: list[_Moves]) -> None:
        self._steps, self._rows = steps, rows
        # Least time, then fewest bytes; and the reverse.
        fast = _cheapest(steps, rows, INFEASIBLE_NS, 1)
        small = _cheapest(steps, rows, 1, INFEASIBLE_NS)
        # Ascending time, descending bytes.
        self._paths = [fast, small] if small.held_bytes < fast.held_bytes else [fast]
        # Bytes of paths that are adjacent to the next one on the hull.
        self._next_to: set[int] = set()

    def side(self, available: int) -> _HullSection | None:
        """Return the hull around so many bytes; None where every path holds more."""
        paths = self._paths
        if paths[0].held_bytes <= available:
            return _HullSection(paths[0], paths[0], paths[0].time_ns, [])
        if paths[-1].held_bytes > available:
            return None
        while True:
            at = next(n for n, path in enumerate(paths) if path.held_bytes <= available)
            fast, small = paths[at - 1], paths[at]
            if fast.held_bytes in self._next_to:
                break
            path = _cheapest(self._steps, self._rows, 1, _multiplier(fast, small))
            if small.held_bytes < path.held_bytes < fast.held_bytes:
                paths.insert(at, path)
            else:
                self._next_to.add(fast.held_bytes)
        multiplier = _multiplier(fast, small)
        # No path is below the line between the two, except for rounding.
        saved_ns = (small.time_ns - fast.time_ns) * (small.held_bytes - available)
        lower_ns = small.time_ns + saved_ns // (fast.held_bytes - small.held_bytes)
        slack_ns = 1 + _ROUNDING * (small.time_ns + multiplier * fast.held_bytes)
        near = paths[max(0, at - 3) : at + 3]
        multipliers = [_multiplier(one, other) for one, other in pairwise(near)]
        return _HullSection(fast, small, lower_ns - math.ceil(slack_ns), multipliers)


def _multiplier(fast: _Path, small: _Path) -> float:
    """Return the multiplier at which two paths cost the same."""
    return (small.time_ns - fast.time_ns) / (fast.held_bytes - small.held_bytes)


@lru_cache(maxsize=64)
def _hull(problem: Problem, point: int) -> _Hull:
    steps = worthwhile_steps(problem)
    return _Hull(steps, [_moves(steps, start, point) for start in range(len(steps))])


def _moves(steps: Steps, start: int, point: int) -> _Moves:
    """Return the steps that start at a block, with their bytes at the point."""
    saved, _, forward, backward, extra_ns, _ = steps.numbers[start].T
    stops = steps.stops(start)
    running = np.maximum(forward, backward) if start <= point else 0
    held = np.where(stops <= point, saved, running)
    return stops.tolist(), extra_ns.tolist(), held.tolist()


def _cheapest(
    steps: Steps, rows: list[_Moves], time_weight: float, multiplier: float
) -> _Path:
    """Return the cheapest path; exact for integer weights."""
    cost: list[float] = [0] + [float("inf")] * len(rows)
    best: list[tuple[int, int] | None] = [None] * (len(rows) + 1)
    for start, row in enumerate(rows):
        here = cost[start]
        for index, (stop, time_ns, held) in enumerate(zip(*row, strict=True)):
            there = here + time_weight * time_ns + multiplier * held
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


def _before(rows: Sequence[_Moves], multiplier: float) -> list[float]:
    """Return the least cost of the blocks before each one: time and saved bytes."""
    cost = [0.0] + [float("inf")] * len(rows)
    for start, row in enumerate(rows):
        here = cost[start]
        for stop, extra_ns, saved_bytes in zip(*row, strict=True):
            there = here + extra_ns + multiplier * saved_bytes
            cost[stop] = min(cost[stop], there)
    return cost


def _joined_paths(fast: _Path, small: _Path, available: int) -> _Path | None:
    """Return the smaller path up to some block and the faster after it, if it fits."""
    # With the fewest blocks of the smaller path that make it fit, by bisection.
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
    """Whether the peak of the steps is within the available bytes."""
    saved = cached = 0
    for step in steps:
        if saved + max(cached + step.forward_bytes, step.backward_bytes) > available:
            return False
        saved += step.saved_bytes
        cached += step.cached_bytes
    return True
