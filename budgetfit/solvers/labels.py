"""DP labels: the Pareto-optimal ways to run the rest of a chain.

The DP goes from the last block to the first. A label stands for one way to run the
blocks from some block on; the blocks before only add the bytes that they save. So a
label has three numbers:

* cost: its extra time, then how many blocks it wraps;
* backward need: its peak above the bytes saved before it, in its backward;
* forward need: the same in its forward, where autocast's weight copies
  (``BlockOption.cached_bytes``) are alive as well, until the forward pass ends.

A label that another one equals or beats in all three is dropped. For a step s before a
label r, with the needs f and b, saved bytes S and weight copies c of the step:

    forward(s + r)  = max(f_s, S_s + c_s + forward(r))
    backward(s + r) = max(S_s + x_out(s) + later gradients + b_s, S_s + backward(r))

At the first block the labels are the whole Pareto front of peak and time. Ties in time,
peak and wrapped blocks are decided by index: of equal labels the one stays whose first
step comes first in ``steps_from``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.recipe import Segment
from budgetfit.solvers.pareto import Ints, pareto_indices
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.transitions import ChainStep, Steps


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The labels of one block, in ascending order of ``backward``.

    ``step`` is the index of the first step among those that start there, ``rest`` the
    index of the following label, at the block where the step stops.
    """

    backward: Ints
    cost: Ints
    forward: Ints
    step: NDArray[np.int16]
    rest: NDArray[np.int32]

    def only(self, chosen: NDArray[np.intp]) -> "Labels":
        """Return the labels with these indices."""
        return Labels(
            self.backward[chosen],
            self.cost[chosen],
            self.forward[chosen],
            self.step[chosen],
            self.rest[chosen],
        )


# Drops some labels of a block: (block, labels) -> labels.
LabelFilter = Callable[[int, Labels], Labels]


class TooManyLabels(Exception):  # noqa: N818 - a signal, not an error
    """A block has more labels than allowed."""


def limit_labels(max_labels: int) -> LabelFilter:
    """Return a filter that raises ``TooManyLabels`` where a block has more labels."""

    def stop(_: int, labels: Labels) -> Labels:
        if labels.cost.size > max_labels:
            raise TooManyLabels
        return labels

    return stop


class PrefixBytes(NamedTuple):
    """Bounds on the bytes that the blocks before one have saved and cached."""

    least_saved: int
    most_saved: int
    least_cached: int
    most_cached: int


# After the last block nothing is needed, whatever was saved before.
_NOTHING: Final = np.full(1, -(2**60), np.int64)
_ZERO: Final = np.zeros(1, np.int64)
_END: Final = Labels(
    _NOTHING, _ZERO, _NOTHING, _ZERO.astype(np.int16), _ZERO.astype(np.int32)
)


def all_labels(
    problem: Problem,
    steps: Sequence[list[ChainStep]],
    limit: LabelFilter,
    cut: LabelFilter | None = None,
) -> list[Labels]:
    """Return each block's labels, and those after the last block.

    Args:
        problem: The chain and the budget; labels that cannot fit are dropped.
        steps: The steps that start at each block.
        limit: Called with the Pareto-optimal labels of a block.
        cut: Called with all labels of a block, before the Pareto filter.
    """
    before = prefix_bytes(steps)
    available = available_bytes(problem)
    optimizer = optimizer_need(problem)
    known = Steps.of(steps)
    labels = [_END]
    for start in range(len(steps) - 1, -1, -1):
        stops = known.stops(start).tolist()
        extended = _extended(
            known.numbers[start], stops, labels, start, cost_unit(problem)
        )
        found = _with_equal_hidden_needs(extended, before[start], optimizer)
        fits = found.backward <= available - before[start].least_saved
        found = found.only(np.flatnonzero(fits))
        if cut is not None:
            found = cut(start, found)
        kept = pareto_indices(found.backward, found.cost, found.forward)
        labels.insert(0, limit(start, found.only(kept)))
    return labels


def plan_from_label(
    problem: Problem, steps: Sequence[list[ChainStep]], labels: list[Labels], label: int
) -> tuple[Segment, ...]:
    """Return the plan of a label of the first block."""
    chosen = []
    start = 0
    while start < len(steps):
        step = steps[start][labels[start].step[label]]
        chosen.append(step)
        start, label = step.stop, int(labels[start].rest[label])
    return segments_from_steps(problem, chosen)


def segments_from_steps(
    problem: Problem, steps: Sequence[ChainStep]
) -> tuple[Segment, ...]:
    """Return the segments of these steps, without kept blocks."""
    made = (step.segment(problem.chain) for step in steps)
    return tuple(each for each in made if each is not None)


def available_bytes(problem: Problem) -> int:
    """Return the budget less the static bytes."""
    return problem.limit_bytes - problem.chain.static_bytes


def optimizer_need(problem: Problem) -> int:
    """Return the bytes of the optimizer step above the static ones."""
    chain = problem.chain
    return chain.optimizer_bytes + sum(each.gradient_bytes for each in chain.blocks)


def cost_unit(problem: Problem) -> int:
    """Return the cost of a nanosecond: more than that of all wrapped blocks."""
    return len(problem.chain.blocks) + 1


def prefix_bytes(steps: Sequence[list[ChainStep]]) -> list[PrefixBytes]:
    """Return, for each block, bounds on the bytes saved and cached before it."""
    least = np.full((len(steps) + 1, 2), 2**60)
    most = -least
    least[0] = most[0] = 0
    known = Steps.of(steps)
    for start, numbers in enumerate(known.numbers):
        stops, added = known.stops(start), numbers[:, :2]  # saved, cached
        np.minimum.at(least, stops, least[start] + added)
        np.maximum.at(most, stops, most[start] + added)
    bounds = np.stack([least, most], axis=2)[:-1].reshape(-1, 4).tolist()
    return [PrefixBytes(*each) for each in bounds]


def _extended(
    numbers: Ints, stops: list[int], labels: list[Labels], start: int, unit: int
) -> Labels:
    """Return the labels of a block: every step with every label after it."""
    # ``labels[0]`` belongs to block ``start + 1``.
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


def _with_equal_hidden_needs(
    labels: Labels, before: PrefixBytes, optimizer: int
) -> Labels:
    """Raise needs that never decide the peak to the level where they would."""
    # No peak changes, and labels that never differ in peak become equal. Where every
    # option caches the same bytes, both needs become equal.
    backward = np.maximum(labels.backward, labels.forward + before.least_cached)
    backward = np.maximum(backward, optimizer - before.most_saved)
    forward = np.maximum(labels.forward, backward - before.most_cached)
    return Labels(backward, labels.cost, forward, labels.step, labels.rest)
