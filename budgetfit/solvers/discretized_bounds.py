"""Upper and lower bounds on the fastest plan's time, by DP on a grid of bytes.

The DP goes from the first block to the last, over a grid of the bytes saved so far.
With the bytes of every step rounded up, a plan that fits the grid fits the budget: an
upper bound. Rounded down, a plan that fits the budget fits the grid: a lower bound.
Whether a step fits depends only on the bytes before it, since the gradients of later
blocks are a known sum.

Autocast's weight copies (``cached_bytes``) are alive in the forward pass only, so that
two sums matter. Each has its own DP pass, which assumes the minimum of the other sum
for the lower bound and its maximum for the upper. The better bound of both counts;
where no choice changes the copies, one pass is enough.

The lower bounds are kept for every block and every number of bytes: with them the exact
search drops labels that cannot improve on the best known plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from budgetfit.solvers.labels import available_bytes, optimizer_need, prefix_bytes
from budgetfit.solvers.lagrangian_bounds import INFEASIBLE_NS
from budgetfit.solvers.pareto import Ints
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.transitions import ChainStep


class _Move(NamedTuple):
    """A step on the grid: allowed with at most ``limit`` slots saved before it."""

    step: ChainStep
    slots: int
    limit: int


class _GridPass(NamedTuple):
    """One DP pass over the grid.

    ``lower_ns[block][slots]`` is the least extra time of the blocks before one that
    leaves at most so many slots.
    """

    grid: "_Grid"
    moves: list[list[_Move]]
    lower_ns: Ints


@dataclass(frozen=True, slots=True, eq=False)
class DiscretizedBounds:
    """Bounds on the extra time of the fastest plan within a budget.

    Attributes:
        lower_ns: No plan takes less; ``INFEASIBLE_NS`` if no plan exists.
        upper_ns: The fastest one takes no more; ``INFEASIBLE_NS`` if none was found.
        steps: The plan that takes ``upper_ns``; empty if none was found.
    """

    lower_ns: int
    upper_ns: int
    steps: tuple[ChainStep, ...]
    _lower: _GridPass
    _lower_forward: _GridPass
    _available: int

    def least_before(self, block: int, backward: Ints, forward: Ints) -> Ints:
        """Return a lower bound on the extra time of the blocks before each label.

        ``backward``: each label's need above the saved bytes, in its backward;
        ``forward``: the same above the saved bytes and copies, in its forward.
        """
        saved = _looked_up(self._lower, block, self._available - backward)
        if self._lower_forward is self._lower:
            return saved
        both = _looked_up(self._lower_forward, block, self._available - forward)
        return np.maximum(saved, both)


class _Sum(NamedTuple):
    """The bytes that a DP pass sums, and its assumption on those that it does not.

    ``on_top`` and ``gone``: for each block, the copies not in the sum that are alive in
    the forward pass, and those in the sum that are freed before the backward pass.
    """

    with_copies: bool
    on_top: list[int]
    gone: list[int]


def discretized_bounds(
    problem: Problem, steps: Sequence[list[ChainStep]], slots: int
) -> DiscretizedBounds:
    """Return bounds on the extra time of the fastest plan, on a grid of ``slots``."""
    before = prefix_bytes(steps)
    available = available_bytes(problem)
    zeros = [0] * len(before)
    least = [each.least_cached for each in before]
    most = [each.most_cached for each in before]
    grid = _Grid.of(steps, available, slots)
    below = [grid.grid_pass(steps, _Sum(False, least, zeros), up=False)]
    above = [grid.grid_pass(steps, _Sum(False, most, zeros), up=True)]
    if least != most:
        below.append(grid.grid_pass(steps, _Sum(True, zeros, most), up=False))
        above.append(grid.grid_pass(steps, _Sum(True, zeros, least), up=True))
    fits = optimizer_need(problem) <= available
    best = min(above, key=lambda each: int(each.lower_ns[-1, -1]))
    upper_ns = int(best.lower_ns[-1, -1]) if fits else INFEASIBLE_NS
    lower_ns = (
        max(int(each.lower_ns[-1, -1]) for each in below) if fits else INFEASIBLE_NS
    )
    return DiscretizedBounds(
        lower_ns=min(lower_ns, INFEASIBLE_NS),
        upper_ns=min(upper_ns, INFEASIBLE_NS),
        steps=_steps_of(best) if upper_ns < INFEASIBLE_NS else (),
        _lower=below[0],
        _lower_forward=below[-1],
        _available=available,
    )


class _Grid(NamedTuple):
    """Slots of ``slot_bytes``; slot ``zero`` is 0 bytes, as sums may be negative."""

    available: int
    slot_bytes: int
    zero: int

    @classmethod
    def of(
        cls, steps: Sequence[list[ChainStep]], available: int, slots: int
    ) -> "_Grid":
        """Return a grid of about ``slots`` slots up to the available bytes."""
        slot_bytes = max(1, -(-available // slots))
        # Some blocks free more than they save.
        lowest = sum(
            min(0, *(s.saved_bytes + min(0, s.cached_bytes) for s in row))
            for row in steps
        )
        # Each block is rounded down by less than a slot.
        zero = len(steps) - lowest // slot_bytes if lowest else 0
        return cls(available, slot_bytes, zero)

    def grid_pass(
        self, steps: Sequence[list[ChainStep]], summed: _Sum, *, up: bool
    ) -> _GridPass:
        """Return the least extra times, with the bytes of steps rounded up or down."""
        count = max(0, self.available) // self.slot_bytes + 1 + self.zero
        lower_ns = np.full((len(steps) + 1, count), INFEASIBLE_NS, np.int64)
        lower_ns[0, self.zero :] = 0
        moves = [
            [self._move(step, summed, start, up=up) for step in row]
            for start, row in enumerate(steps)
        ]
        for start, row in enumerate(moves):
            here = lower_ns[start]
            np.minimum.accumulate(here, out=here)
            for step, slots, limit in row:
                there = lower_ns[step.stop]
                first, last = max(0, -slots), min(limit + 1, count, count - slots)
                if first < last:
                    part = there[first + slots : last + slots]
                    np.minimum(part, here[first:last] + step.extra_ns, out=part)
                if not up and limit >= 0 and limit + slots >= count:
                    # Allowed above the last slot: clamp to it.
                    fastest_ns = here[min(limit, count - 1)] + step.extra_ns
                    there[-1] = min(there[-1], fastest_ns)
        np.minimum.accumulate(lower_ns[-1], out=lower_ns[-1])
        return _GridPass(self, moves, lower_ns)

    def _move(self, step: ChainStep, summed: _Sum, start: int, *, up: bool) -> _Move:
        need = max(
            step.forward_bytes + summed.on_top[start],
            step.backward_bytes - summed.gone[start],
        )
        added = step.saved_bytes + step.cached_bytes * summed.with_copies
        slots = -(-added // self.slot_bytes) if up else added // self.slot_bytes
        limit = (self.available - need) // self.slot_bytes + self.zero
        return _Move(step, slots, limit)


def _steps_of(grid_pass: _GridPass) -> tuple[ChainStep, ...]:
    """Return the steps of the fastest path, by backtracking."""
    arriving: list[list[tuple[int, _Move]]] = [[] for _ in grid_pass.lower_ns]
    for start, row in enumerate(grid_pass.moves):
        for move in row:
            arriving[move.step.stop].append((start, move))
    top = grid_pass.lower_ns.shape[1] - 1
    block, slots = len(grid_pass.moves), top
    chosen = []
    while block:
        wanted = grid_pass.lower_ns[block, slots]
        block, slots, step = next(
            (start, left, move.step)
            for start, move in arriving[block]
            if (left := min(slots - move.slots, move.limit, top)) >= 0
            and grid_pass.lower_ns[start, left] + move.step.extra_ns == wanted
        )
        chosen.append(step)
    return tuple(reversed(chosen))


def _looked_up(grid_pass: _GridPass, block: int, room: Ints) -> Ints:
    """Look up the least time of the blocks before one, for each number of bytes."""
    slots = room // grid_pass.grid.slot_bytes + grid_pass.grid.zero
    found = grid_pass.lower_ns[
        block, np.clip(slots, 0, grid_pass.lower_ns.shape[1] - 1)
    ]
    return np.where(slots < 0, INFEASIBLE_NS, found)
