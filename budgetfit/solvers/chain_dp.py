"""The fastest plan, and the one of lowest peak, by exact labels between two bounds.

One pass of labels (``solvers.labels``) answers for every budget up to the given one and
settles ties exactly: least time, then lowest peak, then fewest wrapped blocks. Where
blocks all differ, labels multiply. Then the sandwich (``solvers.sandwich``) bounds what
the fastest plan takes; labels that cannot lead below its upper bound are dropped, and
mostly so few remain that the answer is exact again. If not, those with the best bound
stay, and the least bound among the others is the certificate: how far from optimal the
plan can be at most. The same problem always gives the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.discretized_bounds import Sandwich, sandwich
from budgetfit.solvers.labels import (
    Labels,
    Thin,
    TooManyLabels,
    all_labels,
    at_most,
    cost_unit,
    plan_of,
    segments_of,
)
from budgetfit.solvers.lagrangian_bounds import NEVER, Relaxation, relaxation
from budgetfit.solvers.pareto import Ints
from budgetfit.solvers.problem import Problem, Solution, describe
from budgetfit.solvers.transitions import ChainStep, steps_of
from budgetfit.solvers.uniform_segments import best_uniform_segments

# Per block, where bounds cut labels down: 126 blocks that all differ have some 3,000.
MOST_LABELS: Final = 10_000
# Without bounds: equal blocks have fewer, and bounds cost more than these.
FEW_LABELS: Final = 500
_CLOSE: Final = 200  # a half per cent of a step's time
# Nor can bounds help to find the lowest peak, which few labels lead to, or a whole
# front, which takes seconds with so many.
MOST_PEAK_LABELS: Final = 20_000
MOST_FRONT_LABELS: Final = 4_000
# Slots of the grid, finer while the certificate is above a thousandth of the step.
GRIDS: Final = (2**14, 2**16, 2**18)
_CERTIFICATE: Final = 1_000


def chain_dp(
    problem: Problem,
    most_labels: int = MOST_LABELS,
    *,
    few_labels: int = FEW_LABELS,
    grids: Sequence[int] = GRIDS,
) -> Solution:
    """Return the fastest plan within the budget; the lowest peak decides ties.

    Proven, or with a bound on the time of the best plan (``Solution.least_time_ns``)
    and how far that can be away, in per cent of the plan's own time.

    Args:
        problem: The chain, the budget and the longest segment allowed.
        most_labels: Most labels of a block that are looked at.
        few_labels: With more labels of a block, bounds are looked for.
        grids: Slots to look for them with, until the certificate is good enough.
    """
    steps = steps_of(problem)
    bounds = relaxation(problem)
    if bounds.least_ns >= NEVER:
        return _no_plan()
    cut = _as_fast_as(problem, bounds, bounds.most_ns)
    # Close bounds leave few labels that are of no use.
    close = (bounds.most_ns - bounds.least_ns) * _CLOSE <= chain_time_ns(
        problem.chain, ()
    )
    few = at_most(min(most_labels, few_labels * (4 if close else 1)))
    try:
        labels = all_labels(problem, steps, few, cut)
    except TooManyLabels:
        return _bounded(problem, steps, bounds, most_labels, grids)
    return _exact(problem, steps, labels)


def lowest_peak(problem: Problem, most_labels: int = MOST_PEAK_LABELS) -> Solution:
    """Return the plan of lowest peak if it fits the budget; least time decides ties.

    A budget of ``sys.maxsize`` asks for the lowest peak that there is. What it says of
    the least time holds for a budget as low as that peak. With more than
    ``most_labels`` labels to a block: the best single segment length, unproven.
    """
    # No plan above the best uniform one can be the answer, so none is kept.
    uniform = best_uniform_segments(problem)
    uniform_bytes = chain_peak_bytes(problem.chain, uniform)
    budget_bytes = min(problem.budget_bytes, uniform_bytes)
    steps = steps_of(problem)
    limited = replace(problem, budget_bytes=budget_bytes)
    try:
        labels = all_labels(limited, steps, at_most(most_labels))
    except TooManyLabels:
        fits = uniform_bytes <= problem.budget_bytes
        return Solution(
            segments=uniform if fits else None,
            proven_optimal=False,
            explanation=f"More than {most_labels:,} labels: the single segment length "
            "of lowest peak; nothing is proven.",
        )
    if not labels[0].cost.size:
        return _no_plan()
    return _solution(problem, steps, labels, 0, "no plan has a lower peak")


def pareto_front(
    problem: Problem,
    most_labels: int = MOST_FRONT_LABELS,
    *,
    faster_than_ns: int | None = None,
) -> tuple[Solution, ...]:
    """Return the plans within the budget that no other beats in peak and time.

    Fastest first; empty where none fits. What each says of the least time holds for a
    budget as low as its own peak. With more than ``most_labels`` labels to a
    block some are left out evenly, and the plans are no longer proven.

    Args:
        problem: The chain, the budget and the longest segment allowed.
        most_labels: Most labels of a block that are looked at.
        faster_than_ns: Only plans whose forward and backward take less; None for all.
    """
    steps = steps_of(problem)
    thinned = False
    cut = None
    if faster_than_ns is not None:
        bounds = relaxation(problem)
        most_ns = faster_than_ns - chain_time_ns(problem.chain, ()) - 1
        if bounds.least_ns > most_ns:
            return ()
        cut = _as_fast_as(problem, bounds, most_ns)

    def evenly(_: int, labels: Labels) -> Labels:
        nonlocal thinned
        if labels.cost.size <= most_labels:
            return labels
        thinned = True
        return labels.only(
            np.linspace(0, labels.cost.size - 1, most_labels).astype(int)
        )

    labels = all_labels(problem, steps, evenly, cut)
    claim = "no plan is both faster and lower in peak"
    if thinned:
        claim = "others may be a little faster or lower in peak"
    return tuple(
        _solution(problem, steps, labels, label, claim, proven=not thinned)
        for label in _fastest_first(problem, labels)
    )


def _as_fast_as(problem: Problem, bounds: Relaxation, most_ns: int) -> Thin:
    """Return what drops labels that only lead to plans of more extra time."""
    unit = cost_unit(problem)

    def cut(start: int, labels: Labels) -> Labels:
        least_ns = bounds.least_before(start, labels) + labels.cost // unit
        return labels.only(np.flatnonzero(least_ns <= most_ns))

    return cut


def _exact(
    problem: Problem, steps: Sequence[list[ChainStep]], labels: list[Labels]
) -> Solution:
    if not labels[0].cost.size:
        return _no_plan()
    fastest = _fastest_first(problem, labels)[0]
    claim = "no plan within the budget is faster"
    return _solution(problem, steps, labels, fastest, claim)


@dataclass(slots=True)
class _Cut:
    """Drops labels that the bounds make useless, and remembers what else it drops."""

    bounds: Sandwich
    unit: int
    most_labels: int
    most_ns: int
    dropped_ns: int = NEVER

    def least_ns(self, start: int, labels: Labels) -> Ints:
        """Return the least extra time of a plan with each label."""
        before = self.bounds.least_before(start, labels.backward, labels.forward)
        return before + labels.cost // self.unit

    def useless(self, start: int, labels: Labels) -> Labels:
        """Drop labels that cannot lead to a plan as fast as the one that is known."""
        least_ns = self.least_ns(start, labels)
        return labels.only(np.flatnonzero(least_ns <= min(self.most_ns, NEVER - 1)))

    def worst(self, start: int, labels: Labels) -> Labels:
        """Drop the labels of the worst bounds, where there are too many."""
        if labels.cost.size <= self.most_labels:
            return labels
        least_ns = self.least_ns(start, labels)
        order = np.argsort(least_ns, kind="stable")
        left_out = order[self.most_labels :]
        self.dropped_ns = min(self.dropped_ns, int(least_ns[left_out[0]]))
        return labels.only(np.sort(order[: self.most_labels]))


def _bounded(
    problem: Problem,
    steps: Sequence[list[ChainStep]],
    known: Relaxation,
    most_labels: int,
    grids: Sequence[int],
) -> Solution:
    """Return the fastest plan found between ever closer bounds."""
    plain_ns = chain_time_ns(problem.chain, ())
    least_ns, most_ns = known.least_ns, known.most_ns
    plan = segments_of(problem, known.plan) if most_ns < NEVER else None
    for slots in grids:
        bounds = sandwich(problem, steps, slots)
        if bounds.least_ns >= NEVER:
            return _no_plan()
        if bounds.most_ns < most_ns:
            most_ns, plan = bounds.most_ns, segments_of(problem, bounds.steps)
        cut = _Cut(bounds, cost_unit(problem), most_labels, most_ns)
        labels = all_labels(problem, steps, cut.worst, cut.useless)
        if labels[0].cost.size == 0 and cut.dropped_ns == most_ns == NEVER:
            return _no_plan()
        if labels[0].cost.size:
            fastest = _fastest_first(problem, labels)[0]
            found_ns = int(labels[0].cost[fastest]) // cut.unit
            if found_ns < cut.dropped_ns:
                return _exact(problem, steps, labels)
            if found_ns <= most_ns:
                most_ns, plan = found_ns, plan_of(problem, steps, labels, fastest)
        least_ns = max(least_ns, bounds.least_ns, min(most_ns, cut.dropped_ns))
        if plan is not None and (most_ns - least_ns) * _CERTIFICATE <= plain_ns:
            break
    if plan is None:
        return _last_resort(problem, plain_ns + least_ns)
    return _certified(problem, plan, plain_ns + least_ns)


def _certified(
    problem: Problem, plan: tuple[Segment, ...], least_time_ns: int
) -> Solution:
    """Return a plan between bounds, and how far from optimal it can be."""
    time_ns = chain_time_ns(problem.chain, plan)
    gap = (time_ns - least_time_ns) / time_ns if time_ns else 0.0
    return Solution(
        segments=plan,
        proven_optimal=time_ns == least_time_ns,
        explanation=f"{describe(problem.chain, plan)}; no plan within the budget is "
        f"faster by more than {gap:.3%} of its time (bounds on a grid).",
        least_time_ns=least_time_ns,
    )


def _last_resort(problem: Problem, least_time_ns: int) -> Solution:
    """Return the plan of lowest peak where no grid was fine enough to find one."""
    lowest = lowest_peak(problem)
    if lowest.segments is None:
        return lowest
    return _certified(problem, lowest.segments, least_time_ns)


def _fastest_first(problem: Problem, labels: list[Labels]) -> list[int]:
    """Return the first block's labels, of each time the one of lowest peak."""
    time = labels[0].cost // cost_unit(problem)
    _, first = np.unique(time, return_index=True)
    return [int(label) for label in first]


def _solution(  # noqa: PLR0913 - one value each, all needed
    problem: Problem,
    steps: Sequence[list[ChainStep]],
    labels: list[Labels],
    label: int,
    claim: str,
    *,
    proven: bool = True,
) -> Solution:
    """Return the plan behind a label of the first block."""
    plan = plan_of(problem, steps, labels, label)
    most = max(each.cost.size for each in labels)
    rounding = ", no rounding" if proven else ""
    return Solution(
        segments=plan,
        proven_optimal=proven,
        explanation=f"{describe(problem.chain, plan)}; {claim} "
        f"(at most {most:,} labels{rounding}).",
        least_time_ns=chain_time_ns(problem.chain, plan) if proven else None,
    )


def _no_plan() -> Solution:
    return Solution(
        segments=None,
        proven_optimal=True,
        explanation="No plan is within the budget, however much is recomputed.",
    )
