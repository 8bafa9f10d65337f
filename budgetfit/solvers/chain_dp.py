"""Exact labels: the fastest plan, and the one of lowest peak, without rounding.

The chain is walked from its last block to its first. A label stands for one way to run
the blocks from some block on; all that the blocks before can do to it is to lift it by
the bytes that they leave behind. So three numbers say everything about it:

* cost: its extra time, then how many blocks it wraps;
* backward need: the most bytes alive above those in front of it, in its backward;
* forward need: the same for its forward, where more is in front: autocast's copies of
  weights (``BlockOption.cached_bytes``), which end with the forward pass.

A label that another one equals or beats in all three is dropped (solver S1). For a step
s in front of a label r, with F and B from memory-model rule C:

    forward(s + r)  = max(f_s, S_s + c_s + forward(r))
    backward(s + r) = max(S_s + x_out(s) + later gradients + b_s, S_s + backward(r))

At the first block nothing is in front, and the labels are the whole front of peak and
time. One pass answers for every budget up to the given one and settles ties exactly:
least time, then lowest peak, then fewest wrapped blocks. Plans that agree in all of
these come down to index order: of equal labels the one stays that wraps its first
block, in the shortest segment. The same problem always gives the same plan.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.recipe import Segment
from budgetfit.memory.chain_peak import chain_peak_bytes
from budgetfit.solvers.chain_steps import ChainStep, chain_steps
from budgetfit.solvers.problem import Problem, Solution, describe
from budgetfit.solvers.undominated import Ints, undominated
from budgetfit.solvers.uniform_segments import best_uniform_segments

# Where blocks all differ, labels multiply. So many per block take a second or two and
# some 100 MB; beyond, the search says so instead of running on.
MOST_LABELS: Final = 200_000


def chain_dp(problem: Problem, most_labels: int = MOST_LABELS) -> Solution:
    """Return the fastest plan within the budget; the lowest peak decides ties.

    Args:
        problem: The chain, the budget and the longest segment allowed.
        most_labels: Give up, with no plan and no proof, above so many labels.
    """
    search = _search(problem, most_labels)
    if isinstance(search, Solution):
        return search
    return search.solution(
        search.fastest_first()[0], "no plan within the budget is faster"
    )


def lowest_peak(problem: Problem, most_labels: int = MOST_LABELS) -> Solution:
    """Return the plan of lowest peak if it fits the budget; least time decides ties.

    A budget of ``sys.maxsize`` asks for the lowest peak that there is.
    """
    # No plan above the best uniform one can be the answer, so none is kept.
    uniform = best_uniform_segments(problem)
    budget_bytes = min(problem.budget_bytes, chain_peak_bytes(problem.chain, uniform))
    search = _search(replace(problem, budget_bytes=budget_bytes), most_labels)
    if isinstance(search, Solution):
        return search
    return search.solution(0, "no plan has a lower peak")


def pareto_front(
    problem: Problem, most_labels: int = MOST_LABELS
) -> tuple[Solution, ...]:
    """Return the plans within the budget that no other beats in peak and time.

    Fastest first. Empty where none fits, or with more than ``most_labels`` labels.
    """
    search = _search(problem, most_labels)
    if isinstance(search, Solution):
        return ()
    return tuple(
        search.solution(label, "no plan is both faster and lower in peak")
        for label in search.fastest_first()
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """The ways to run the blocks from one block on that are worth keeping.

    ``step`` is the number of the first step among those that start there, ``rest`` the
    label behind it, at the block where the step stops. In ascending order of
    ``backward``.
    """

    backward: Ints
    cost: Ints
    forward: Ints
    step: NDArray[np.int16]
    rest: NDArray[np.int32]


# Behind the last block there is nothing, which needs less than any bytes before it.
_NOTHING: Final = np.full(1, -(2**60), np.int64)
_ZERO: Final = np.zeros(1, np.int64)
_END: Final = _Labels(
    _NOTHING, _ZERO, _NOTHING, _ZERO.astype(np.int16), _ZERO.astype(np.int32)
)


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """A finished pass: all labels, and what they were made from."""

    problem: Problem
    steps: list[list[ChainStep]]
    labels: list[_Labels]

    def fastest_first(self) -> list[int]:
        """Return the first block's labels, of each time the one of lowest peak."""
        time = self.labels[0].cost // _cost_unit(self.problem)
        _, first = np.unique(time, return_index=True)
        return [int(label) for label in first]

    def solution(self, label: int, claim: str) -> Solution:
        """Return the plan behind a label of the first block."""
        segments = self._segments(label)
        most = max(labels.cost.size for labels in self.labels)
        described = describe(self.problem.chain, segments)
        return Solution(
            segments=segments,
            proven_optimal=True,
            explanation=f"{described}; {claim} (at most {most:,} labels, no rounding).",
        )

    def _segments(self, label: int) -> tuple[Segment, ...]:
        chain = self.problem.chain
        segments = []
        start = 0
        while start < len(chain.blocks):
            labels = self.labels[start]
            step = self.steps[start][labels.step[label]]
            wrapped = step.segment(chain)
            if wrapped is not None:
                segments.append(wrapped)
            start, label = step.stop, int(labels.rest[label])
        return tuple(segments)


@dataclass(frozen=True, slots=True)
class _Before:
    """What the blocks before one can have left: the least and the most, in bytes."""

    least_saved: int
    most_saved: int
    least_cached: int
    most_cached: int


def _search(problem: Problem, most_labels: int) -> _Search | Solution:
    """Return all labels, or the solution that says why there are none."""
    steps = chain_steps(problem)
    before = _all_before(steps)
    available = problem.budget_bytes - problem.chain.static_bytes
    optimizer = problem.chain.optimizer_bytes + sum(
        block.gradient_bytes for block in problem.chain.blocks
    )
    labels = [_END]
    for start in range(len(steps) - 1, -1, -1):
        grown = _grown(steps[start], labels, start, _cost_unit(problem))
        found = _worth_keeping(grown, before[start], available, optimizer)
        if found.cost.size > most_labels:
            return Solution(
                segments=None,
                proven_optimal=False,
                explanation=f"More than {most_labels:,} labels; nothing is proven.",
            )
        labels.insert(0, found)
    if labels[0].cost.size == 0:
        return Solution(
            segments=None,
            proven_optimal=True,
            explanation="No plan is within the budget, however much is recomputed.",
        )
    return _Search(problem, steps, labels)


def _grown(
    steps: list[ChainStep], labels: list[_Labels], start: int, unit: int
) -> _Labels:
    """Put every step that starts at a block in front of every label behind it.

    ``labels[0]`` belongs to block ``start + 1``.
    """
    behind = [labels[step.stop - start - 1] for step in steps]
    sizes = np.array([each.cost.size for each in behind])
    number = np.repeat(np.arange(len(steps), dtype=np.int16), sizes)
    numbers = np.array([step[1:7] for step in steps], np.int64)
    saved, cached, forward, backward, extra, wrapped = numbers.T
    lift = saved[number]
    lifted_backward = np.concatenate([each.backward for each in behind]) + lift
    lift += cached[number]
    lifted_forward = np.concatenate([each.forward for each in behind]) + lift
    cost = np.concatenate([each.cost for each in behind])
    before = np.cumsum(sizes) - sizes
    return _Labels(
        backward=np.maximum(lifted_backward, backward[number]),
        cost=cost + (extra * unit + wrapped)[number],
        forward=np.maximum(lifted_forward, forward[number]),
        step=number,
        rest=(np.arange(number.size) - before[number]).astype(np.int32),
    )


def _worth_keeping(
    labels: _Labels, before: _Before, available: int, optimizer: int
) -> _Labels:
    """Drop labels that cannot fit or that others dominate.

    A need that another one hides, whatever comes before, is raised to where it would
    show: no peak changes, and labels that differ in nothing visible become equal. Where
    every option caches the same, one need is left in place of two.
    """
    backward = np.maximum(labels.backward, labels.forward + before.least_cached)
    backward = np.maximum(backward, optimizer - before.most_saved)
    forward = np.maximum(labels.forward, backward - before.most_cached)
    fits = np.flatnonzero(backward <= available - before.least_saved)
    kept = fits[undominated(backward[fits], labels.cost[fits], forward[fits])]
    return _Labels(
        backward[kept],
        labels.cost[kept],
        forward[kept],
        labels.step[kept],
        labels.rest[kept],
    )


def _all_before(steps: list[list[ChainStep]]) -> list[_Before]:
    """Return, for each block, what the blocks before it can have left."""
    found: list[list[_Before]] = [[] for _ in range(len(steps) + 1)]
    found[0] = [_Before(0, 0, 0, 0)]
    for start, row in enumerate(steps):
        here = found[start] = [
            _Before(
                min(each.least_saved for each in found[start]),
                max(each.most_saved for each in found[start]),
                min(each.least_cached for each in found[start]),
                max(each.most_cached for each in found[start]),
            )
        ]
        for step in row:
            found[step.stop].append(
                _Before(
                    here[0].least_saved + step.saved_bytes,
                    here[0].most_saved + step.saved_bytes,
                    here[0].least_cached + step.cached_bytes,
                    here[0].most_cached + step.cached_bytes,
                )
            )
    return [each[0] for each in found[:-1]]


def _cost_unit(problem: Problem) -> int:
    """Return what a nanosecond costs, so that wrapped blocks never add up to one."""
    return len(problem.chain.blocks) + 1
