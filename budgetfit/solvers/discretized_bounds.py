"""The sandwich: a plan that fits and a time that no plan can beat (solver S2).

The chain is walked from its first block to its last, over a grid of the bytes saved so
far. With the bytes of every step rounded up, what fits the grid fits the budget: an
upper bound, with its plan. Rounded down, whatever fits the budget fits the grid: a
lower bound. Whether a step fits depends on the bytes before it alone, since the
gradients of later blocks are a known sum (solver-facts 4.4).

Autocast's copies of weights (``cached_bytes``) are alive in the forward pass alone, so
that two sums matter. Each has a walk of its own, over which the other one is taken at
its best for the lower bound and at its worst for the upper. Of both walks the better
bound counts; where no choice changes the copies, they are the same walk.

The lower bounds remain for every block and every number of bytes: with them the search
for exact labels drops what cannot become better than the plan that is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from budgetfit.solvers.labels import (
    all_before,
    available_bytes,
    optimizer_need,
)
from budgetfit.solvers.lagrangian_bounds import NEVER
from budgetfit.solvers.pareto import Ints
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.transitions import ChainStep


class _Move(NamedTuple):
    """A step on the grid: allowed up to ``limit`` slots before it."""

    step: ChainStep
    slots: int
    limit: int


class _Walk(NamedTuple):
    """One walk over the grid.

    ``least_ns[block][slots]`` is the least extra time of the blocks before one that
    leaves at most so many slots.
    """

    grid: "_Grid"
    moves: list[list[_Move]]
    least_ns: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Sandwich:
    """Bounds on the extra time of the fastest plan within a budget.

    Attributes:
        least_ns: No plan takes less; ``NEVER`` if there is none.
        most_ns: The fastest one takes no more; ``NEVER`` if none was found.
        steps: The plan that takes ``most_ns``; empty if none was found.
    """

    least_ns: int
    most_ns: int
    steps: tuple[ChainStep, ...]
    _below: _Walk
    _below_forward: _Walk
    _available: int

    def least_before(self, block: int, backward: Ints, forward: Ints) -> Ints:
        """Return the least extra time of the blocks before one, for each label of it.

        Args:
            block: Its number.
            backward: What each label needs above the saved bytes, in its backward.
            forward: The same above the saved bytes and copies, in its forward.
        """
        saved = _looked_up(self._below, block, self._available - backward)
        if self._below_forward is self._below:
            return saved
        both = _looked_up(self._below_forward, block, self._available - forward)
        return np.maximum(saved, both)


class _Sum(NamedTuple):
    """What a walk sums up, and what it takes for the bytes that it does not.

    ``on_top`` and ``gone``: for each block, the copies besides the sum in the forward
    pass, and those in the sum that the backward pass does not find.
    """

    with_copies: bool
    on_top: list[int]
    gone: list[int]


def sandwich(
    problem: Problem, steps: Sequence[list[ChainStep]], slots: int
) -> Sandwich:
    """Return bounds on the extra time of the fastest plan, from a grid of ``slots``."""
    before = all_before(steps)
    available = available_bytes(problem)
    zeros = [0] * len(before)
    least = [each.least_cached for each in before]
    most = [each.most_cached for each in before]
    grid = _Grid.of(steps, available, slots)
    below = [grid.walk(steps, _Sum(False, least, zeros), up=False)]
    above = [grid.walk(steps, _Sum(False, most, zeros), up=True)]
    if least != most:
        below.append(grid.walk(steps, _Sum(True, zeros, most), up=False))
        above.append(grid.walk(steps, _Sum(True, zeros, least), up=True))
    fits = optimizer_need(problem) <= available
    best = min(above, key=lambda each: int(each.least_ns[-1, -1]))
    most_ns = int(best.least_ns[-1, -1]) if fits else NEVER
    least_ns = max(int(each.least_ns[-1, -1]) for each in below) if fits else NEVER
    return Sandwich(
        least_ns=min(least_ns, NEVER),
        most_ns=min(most_ns, NEVER),
        steps=_steps_of(best) if most_ns < NEVER else (),
        _below=below[0],
        _below_forward=below[-1],
        _available=available,
    )


class _Grid(NamedTuple):
    """Slots of so many bytes; slot ``zero`` is no byte, a sum can fall below it."""

    available: int
    slot_bytes: int
    zero: int

    @classmethod
    def of(
        cls, steps: Sequence[list[ChainStep]], available: int, slots: int
    ) -> "_Grid":
        """Return a grid of about so many slots up to what is available."""
        slot_bytes = max(1, -(-available // slots))
        # Some blocks may free more than they save.
        lowest = sum(
            min(0, *(s.saved_bytes + min(0, s.cached_bytes) for s in row))
            for row in steps
        )
        # Each block rounds down by less than a slot.
        zero = len(steps) - lowest // slot_bytes if lowest else 0
        return cls(available, slot_bytes, zero)

    def walk(
        self, steps: Sequence[list[ChainStep]], summed: _Sum, *, up: bool
    ) -> _Walk:
        """Return the least extra times, with the bytes of steps rounded up or down."""
        count = max(0, self.available) // self.slot_bytes + 1 + self.zero
        least_ns = np.full((len(steps) + 1, count), NEVER, np.int64)
        least_ns[0, self.zero :] = 0
        moves = [
            [self._move(step, summed, start, up=up) for step in row]
            for start, row in enumerate(steps)
        ]
        for start, row in enumerate(moves):
            here = least_ns[start]
            np.minimum.accumulate(here, out=here)
            for step, slots, limit in row:
                there = least_ns[step.stop]
                first, last = max(0, -slots), min(limit + 1, count, count - slots)
                if first < last:
                    part = there[first + slots : last + slots]
                    np.minimum(part, here[first:last] + step.extra_ns, out=part)
                if not up and limit >= 0 and limit + slots >= count:
                    # More than all slots, and yet allowed: one slot says so.
                    fastest_ns = here[min(limit, count - 1)] + step.extra_ns
                    there[-1] = min(there[-1], fastest_ns)
        np.minimum.accumulate(least_ns[-1], out=least_ns[-1])
        return _Walk(self, moves, least_ns)

    def _move(self, step: ChainStep, summed: _Sum, start: int, *, up: bool) -> _Move:
        need = max(
            step.forward_bytes + summed.on_top[start],
            step.backward_bytes - summed.gone[start],
        )
        added = step.saved_bytes + step.cached_bytes * summed.with_copies
        slots = -(-added // self.slot_bytes) if up else added // self.slot_bytes
        limit = (self.available - need) // self.slot_bytes + self.zero
        return _Move(step, slots, limit)


def _steps_of(walk: _Walk) -> tuple[ChainStep, ...]:
    """Return the steps of the fastest way over the grid, found from its end."""
    arriving: list[list[tuple[int, _Move]]] = [[] for _ in walk.least_ns]
    for start, row in enumerate(walk.moves):
        for move in row:
            arriving[move.step.stop].append((start, move))
    top = walk.least_ns.shape[1] - 1
    block, slots = len(walk.moves), top
    chosen = []
    while block:
        wanted = walk.least_ns[block, slots]
        block, slots, step = next(
            (start, left, move.step)
            for start, move in arriving[block]
            if (left := min(slots - move.slots, move.limit, top)) >= 0
            and walk.least_ns[start, left] + move.step.extra_ns == wanted
        )
        chosen.append(step)
    return tuple(reversed(chosen))


def _looked_up(walk: _Walk, block: int, room: Ints) -> Ints:
    """Return the least time of the blocks before one within some bytes each."""
    slots = room // walk.grid.slot_bytes + walk.grid.zero
    found = walk.least_ns[block, np.clip(slots, 0, walk.least_ns.shape[1] - 1)]
    return np.where(slots < 0, NEVER, found)
