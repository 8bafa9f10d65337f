"""Labels: the ways to run the end of a chain that are worth keeping (solver S1).

The chain is walked from its last block to its first. A label stands for one way to run
the blocks from some block on; all that the blocks before can do to it is to lift it by
the bytes that they leave behind. So three numbers say everything about it:

* cost: its extra time, then how many blocks it wraps;
* backward need: the most bytes alive above those in front of it, in its backward;
* forward need: the same for its forward, where more is in front: autocast's copies of
  weights (``BlockOption.cached_bytes``), which end with the forward pass.

A label that another one equals or beats in all three is dropped. For a step s in front
of a label r, with F and B from memory-model rule C:

    forward(s + r)  = max(f_s, S_s + c_s + forward(r))
    backward(s + r) = max(S_s + x_out(s) + later gradients + b_s, S_s + backward(r))

At the first block nothing is in front, and the labels are the whole front of peak and
time. Plans that agree in time, peak and wrapped blocks come down to index order: of
equal labels the one stays whose first step comes first in ``chain_steps``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.recipe import Segment
from budgetfit.solvers.pareto import Ints, undominated
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.transitions import ChainStep, Steps


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The labels of one block, in ascending order of ``backward``.

    ``step`` is the number of the first step among those that start there, ``rest`` the
    label behind it, at the block where the step stops.
    """

    backward: Ints
    cost: Ints
    forward: Ints
    step: NDArray[np.int16]
    rest: NDArray[np.int32]

    def only(self, chosen: NDArray[np.intp]) -> "Labels":
        """Return the labels of these numbers."""
        return Labels(
            self.backward[chosen],
            self.cost[chosen],
            self.forward[chosen],
            self.step[chosen],
            self.rest[chosen],
        )


# Keeps some labels of a block, for whatever reason: (block, labels) -> labels.
Thin = Callable[[int, Labels], Labels]


class TooManyLabels(Exception):  # noqa: N818 - a signal, not an error
    """A block has more labels than allowed."""


def at_most(most_labels: int) -> Thin:
    """Return what stops the search where a block has more labels."""

    def stop(_: int, labels: Labels) -> Labels:
        if labels.cost.size > most_labels:
            raise TooManyLabels
        return labels

    return stop


class Before(NamedTuple):
    """What the blocks before one can have left: the least and the most, in bytes."""

    least_saved: int
    most_saved: int
    least_cached: int
    most_cached: int


# Behind the last block there is nothing, which needs less than any bytes before it.
_NOTHING: Final = np.full(1, -(2**60), np.int64)
_ZERO: Final = np.zeros(1, np.int64)
_END: Final = Labels(
    _NOTHING, _ZERO, _NOTHING, _ZERO.astype(np.int16), _ZERO.astype(np.int32)
)


def all_labels(
    problem: Problem,
    steps: Sequence[list[ChainStep]],
    limit: Thin,
    cut: Thin | None = None,
) -> list[Labels]:
    """Return each block's labels, and those behind the last block.

    Args:
        problem: The chain and the budget; labels that cannot fit are dropped.
        steps: What can start at each block.
        limit: Called with the labels of a block that no other dominates.
        cut: Called before these are found, when there are many more.
    """
    before = all_before(steps)
    available = available_bytes(problem)
    optimizer = optimizer_need(problem)
    known = Steps.of(steps)
    labels = [_END]
    for start in range(len(steps) - 1, -1, -1):
        stops = known.stops(start).tolist()
        grown = _grown(known.numbers[start], stops, labels, start, cost_unit(problem))
        found = _shown(grown, before[start], optimizer)
        fits = found.backward <= available - before[start].least_saved
        found = found.only(np.flatnonzero(fits))
        if cut is not None:
            found = cut(start, found)
        kept = undominated(found.backward, found.cost, found.forward)
        labels.insert(0, limit(start, found.only(kept)))
    return labels


def plan_of(
    problem: Problem, steps: Sequence[list[ChainStep]], labels: list[Labels], label: int
) -> tuple[Segment, ...]:
    """Return the segments behind a label of the first block."""
    chosen = []
    start = 0
    while start < len(steps):
        step = steps[start][labels[start].step[label]]
        chosen.append(step)
        start, label = step.stop, int(labels[start].rest[label])
    return segments_of(problem, chosen)


def segments_of(problem: Problem, steps: Sequence[ChainStep]) -> tuple[Segment, ...]:
    """Return the segments among these steps."""
    made = (step.segment(problem.chain) for step in steps)
    return tuple(each for each in made if each is not None)


def available_bytes(problem: Problem) -> int:
    """Return what the budget leaves above the static bytes."""
    return problem.budget_bytes - problem.chain.static_bytes


def optimizer_need(problem: Problem) -> int:
    """Return what the optimizer step needs above the static bytes."""
    chain = problem.chain
    return chain.optimizer_bytes + sum(each.gradient_bytes for each in chain.blocks)


def cost_unit(problem: Problem) -> int:
    """Return what a nanosecond costs, so that wrapped blocks never add up to one."""
    return len(problem.chain.blocks) + 1


def all_before(steps: Sequence[list[ChainStep]]) -> list[Before]:
    """Return, for each block, what the blocks before it can have left."""
    least = np.full((len(steps) + 1, 2), 2**60)
    most = -least
    least[0] = most[0] = 0
    known = Steps.of(steps)
    for start, numbers in enumerate(known.numbers):
        stops, added = known.stops(start), numbers[:, :2]  # saved, cached
        np.minimum.at(least, stops, least[start] + added)
        np.maximum.at(most, stops, most[start] + added)
    bounds = np.stack([least, most], axis=2)[:-1].reshape(-1, 4).tolist()
    return [Before(*each) for each in bounds]


def _grown(
    numbers: Ints, stops: list[int], labels: list[Labels], start: int, unit: int
) -> Labels:
    """Put every step that starts at a block in front of every label behind it.

    ``labels[0]`` belongs to block ``start + 1``.
    """
    behind = [labels[stop - start - 1] for stop in stops]
    sizes = np.array([each.cost.size for each in behind])
    number = np.repeat(np.arange(len(stops), dtype=np.int16), sizes)
    saved, cached, forward, backward, extra, wrapped = numbers.T
    lift = saved[number]
    lifted_backward = np.concatenate([each.backward for each in behind]) + lift
    lift += cached[number]
    lifted_forward = np.concatenate([each.forward for each in behind]) + lift
    cost = np.concatenate([each.cost for each in behind])
    before = np.cumsum(sizes) - sizes
    return Labels(
        backward=np.maximum(lifted_backward, backward[number]),
        cost=cost + (extra * unit + wrapped)[number],
        forward=np.maximum(lifted_forward, forward[number]),
        step=number,
        rest=(np.arange(number.size) - before[number]).astype(np.int32),
    )


def _shown(labels: Labels, before: Before, optimizer: int) -> Labels:
    """Raise needs that another one hides, whatever comes before, to where they show.

    No peak changes, and labels that differ in nothing visible become equal. Where every
    option caches the same, one need is left in place of two.
    """
    backward = np.maximum(labels.backward, labels.forward + before.least_cached)
    backward = np.maximum(backward, optimizer - before.most_saved)
    forward = np.maximum(labels.forward, backward - before.most_cached)
    return Labels(backward, labels.cost, forward, labels.step, labels.rest)
