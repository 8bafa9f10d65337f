"""Dynamic programming on the block chain: fastest plan, lowest peak, Pareto front.

One pass of labels (``solvers.labels``) solves for every budget up to the given one, and
ties exactly: least time, then lowest peak, then fewest wrapped blocks. Where blocks all
differ, labels multiply. Then a discretised DP (``solvers.discretized_bounds``) bounds
the time of the fastest plan; labels that cannot lead below its upper bound are dropped,
and usually so few remain that the result is exact again. If not, those with the best
bound stay, and the lowest bound among the dropped ones gives the optimality gap. The
result is deterministic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.discretized_bounds import DiscretizedBounds, discretized_bounds
from budgetfit.solvers.labels import (
    LabelFilter,
    Labels,
    TooManyLabels,
    all_labels,
    cost_unit,
    limit_labels,
    plan_from_label,
    segments_from_steps,
)
from budgetfit.solvers.lagrangian_bounds import (
    INFEASIBLE_NS,
    LagrangianBounds,
    lagrangian_bounds,
)
from budgetfit.solvers.pareto import Ints
from budgetfit.solvers.problem import Problem, Solution, describe
from budgetfit.solvers.transitions import ChainStep, worthwhile_steps
from budgetfit.solvers.uniform_segments import best_uniform_segments

# Per block, with bounds: 126 blocks that all differ have about 3,000.
MAX_LABELS: Final = 10_000
# Per block, without bounds: equal blocks have fewer, and bounds cost more than these.
FEW_LABELS: Final = 500
_CLOSE: Final = 200  # half a per cent of a step's time
# Bounds do not help with the lowest peak, which needs few labels, or a whole front,
# which takes seconds with so many.
MAX_PEAK_LABELS: Final = 20_000
MAX_FRONT_LABELS: Final = 4_000
# Slots of the grid, finer while the gap is above a thousandth of the step.
GRIDS: Final = (2**14, 2**16, 2**18)
_CERTIFICATE: Final = 1_000


def chain_dp(
    problem: Problem,
    max_labels: int = MAX_LABELS,
    *,
    few_labels: int = FEW_LABELS,
    grids: Sequence[int] = GRIDS,
) -> Solution:
    """Return the fastest plan within the budget; the lowest peak decides ties.

    Proven optimal, or with a lower bound on the time of the best plan
    (``Solution.lower_bound_ns``) and the gap in per cent of the plan's time.

    Args:
        problem: The chain, the budget and the longest segment allowed.
        max_labels: Most labels per block.
        few_labels: With more labels of a block, bounds are computed.
        grids: Slots of the bounds' grids, until the gap is small enough.
    """
    steps = worthwhile_steps(problem)
    bounds = lagrangian_bounds(problem)
    if bounds.lower_ns >= INFEASIBLE_NS:
        return _no_plan()
    cut = _as_fast_as(problem, bounds, bounds.upper_ns)
    # Close bounds leave few useless labels.
    close = (bounds.upper_ns - bounds.lower_ns) * _CLOSE <= chain_time_ns(
        problem.chain, ()
    )
    few = limit_labels(min(max_labels, few_labels * (4 if close else 1)))
    try:
        labels = all_labels(problem, steps, few, cut)
    except TooManyLabels:
        return _bounded(problem, steps, bounds, max_labels, grids)
    return _exact(problem, steps, labels)


def lowest_peak(problem: Problem, max_labels: int = MAX_PEAK_LABELS) -> Solution:
    """Return the plan of lowest peak if it fits the budget; least time decides ties.

    A budget of ``sys.maxsize`` asks for the lowest peak of all. The bound on the time
    is for a budget as low as that peak. With more than
    ``max_labels`` labels to a block: the best single segment length, unproven.
    """
    # No plan above the best uniform one can be the result, so that none is kept.
    uniform = best_uniform_segments(problem)
    uniform_bytes = chain_peak_bytes(problem.chain, uniform)
    limit_bytes = min(problem.limit_bytes, uniform_bytes)
    steps = worthwhile_steps(problem)
    limited = replace(problem, limit_bytes=limit_bytes)
    try:
        labels = all_labels(limited, steps, limit_labels(max_labels))
    except TooManyLabels:
        fits = uniform_bytes <= problem.limit_bytes
        return Solution(
            segments=uniform if fits else None,
            proven_optimal=False,
            explanation=f"More than {max_labels:,} labels: the single segment length "
            "of lowest peak; nothing is proven.",
        )
    if not labels[0].cost.size:
        return _no_plan()
    return _solution(problem, steps, labels, 0, "no plan has a lower peak")


def pareto_front(
    problem: Problem,
    max_labels: int = MAX_FRONT_LABELS,
    *,
    faster_than_ns: int | None = None,
) -> tuple[Solution, ...]:
    """Return the Pareto front of peak and time within the budget.

    Fastest first; empty where none fits. Each bound on the time is for a budget as low
    as the plan's peak. With more than ``max_labels`` labels to a
    block some are left out evenly, and the plans are no longer proven.

    ``faster_than_ns``: only plans whose forward and backward take less; None for all.
    """
    steps = worthwhile_steps(problem)
    thinned = False
    cut = None
    if faster_than_ns is not None:
        bounds = lagrangian_bounds(problem)
        upper_ns = faster_than_ns - chain_time_ns(problem.chain, ()) - 1
        if bounds.lower_ns > upper_ns:
            return ()
        cut = _as_fast_as(problem, bounds, upper_ns)

    def evenly(_: int, labels: Labels) -> Labels:
        nonlocal thinned
        if labels.cost.size <= max_labels:
            return labels
        thinned = True
        return labels.only(np.linspace(0, labels.cost.size - 1, max_labels).astype(int))

    labels = all_labels(problem, steps, evenly, cut)
    claim = "no plan is both faster and lower in peak"
    if thinned:
        claim = "others may be a little faster or lower in peak"
    return tuple(
        _solution(problem, steps, labels, label, claim, proven=not thinned)
        for label in _fastest_first(problem, labels)
    )


def _as_fast_as(
    problem: Problem, bounds: LagrangianBounds, upper_ns: int
) -> LabelFilter:
    """Return a filter that drops labels whose extra time must exceed ``upper_ns``."""
    unit = cost_unit(problem)

    def cut(start: int, labels: Labels) -> Labels:
        lower_ns = bounds.least_before(start, labels) + labels.cost // unit
        return labels.only(np.flatnonzero(lower_ns <= upper_ns))

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
    """Drops labels by their bounds; records the lowest bound of useful dropped ones."""

    bounds: DiscretizedBounds
    unit: int
    max_labels: int
    upper_ns: int
    dropped_ns: int = INFEASIBLE_NS

    def lower_ns(self, start: int, labels: Labels) -> Ints:
        """Return a lower bound on the extra time of plans with each label."""
        before = self.bounds.least_before(start, labels.backward, labels.forward)
        return before + labels.cost // self.unit

    def useless(self, start: int, labels: Labels) -> Labels:
        """Drop labels that cannot lead to a plan as fast as the best known."""
        lower_ns = self.lower_ns(start, labels)
        return labels.only(
            np.flatnonzero(lower_ns <= min(self.upper_ns, INFEASIBLE_NS - 1))
        )

    def worst(self, start: int, labels: Labels) -> Labels:
        """Drop the labels with the worst bounds, if there are too many."""
        if labels.cost.size <= self.max_labels:
            return labels
        lower_ns = self.lower_ns(start, labels)
        order = np.argsort(lower_ns, kind="stable")
        left_out = order[self.max_labels :]
        self.dropped_ns = min(self.dropped_ns, int(lower_ns[left_out[0]]))
        return labels.only(np.sort(order[: self.max_labels]))


def _bounded(
    problem: Problem,
    steps: Sequence[list[ChainStep]],
    known: LagrangianBounds,
    max_labels: int,
    grids: Sequence[int],
) -> Solution:
    """Return the fastest plan found with bounds from ever finer grids."""
    plain_ns = chain_time_ns(problem.chain, ())
    lower_ns, upper_ns = known.lower_ns, known.upper_ns
    plan = (
        segments_from_steps(problem, known.plan) if upper_ns < INFEASIBLE_NS else None
    )
    for slots in grids:
        bounds = discretized_bounds(problem, steps, slots)
        if bounds.lower_ns >= INFEASIBLE_NS:
            return _no_plan()
        if bounds.upper_ns < upper_ns:
            upper_ns, plan = bounds.upper_ns, segments_from_steps(problem, bounds.steps)
        cut = _Cut(bounds, cost_unit(problem), max_labels, upper_ns)
        labels = all_labels(problem, steps, cut.worst, cut.useless)
        if labels[0].cost.size == 0 and cut.dropped_ns == upper_ns == INFEASIBLE_NS:
            return _no_plan()
        if labels[0].cost.size:
            fastest = _fastest_first(problem, labels)[0]
            found_ns = int(labels[0].cost[fastest]) // cut.unit
            if found_ns < cut.dropped_ns:
                return _exact(problem, steps, labels)
            if found_ns <= upper_ns:
                upper_ns, plan = (
                    found_ns,
                    plan_from_label(problem, steps, labels, fastest),
                )
        lower_ns = max(lower_ns, bounds.lower_ns, min(upper_ns, cut.dropped_ns))
        if plan is not None and (upper_ns - lower_ns) * _CERTIFICATE <= plain_ns:
            break
    if plan is None:
        return _last_resort(problem, plain_ns + lower_ns)
    return _certified(problem, plan, plain_ns + lower_ns)


def _certified(
    problem: Problem, plan: tuple[Segment, ...], lower_bound_ns: int
) -> Solution:
    """Return a plan with its optimality gap."""
    time_ns = chain_time_ns(problem.chain, plan)
    gap = (time_ns - lower_bound_ns) / time_ns if time_ns else 0.0
    return Solution(
        segments=plan,
        proven_optimal=time_ns == lower_bound_ns,
        explanation=f"{describe(problem.chain, plan)}; no plan within the budget is "
        f"faster by more than {gap:.3%} of its time (bounds on a grid).",
        lower_bound_ns=lower_bound_ns,
    )


def _last_resort(problem: Problem, lower_bound_ns: int) -> Solution:
    """Return the plan of lowest peak where no grid was fine enough for a plan."""
    lowest = lowest_peak(problem)
    if lowest.segments is None:
        return lowest
    return _certified(problem, lowest.segments, lower_bound_ns)


def _fastest_first(problem: Problem, labels: list[Labels]) -> list[int]:
    """Return the first block's labels by time, of each time the lowest peak."""
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
    """Return the solution of a label of the first block."""
    plan = plan_from_label(problem, steps, labels, label)
    most = max(each.cost.size for each in labels)
    rounding = ", no rounding" if proven else ""
    return Solution(
        segments=plan,
        proven_optimal=proven,
        explanation=f"{describe(problem.chain, plan)}; {claim} "
        f"(at most {most:,} labels{rounding}).",
        lower_bound_ns=chain_time_ns(problem.chain, plan) if proven else None,
    )


def _no_plan() -> Solution:
    return Solution(
        segments=None,
        proven_optimal=True,
        explanation="No plan is within the budget, however much is recomputed.",
    )
