"""What other batch sizes and checkpointing would take, for the report's figures.

Evaluated when a report is asked for: a plan does not wait for it. All by the chain
formula, from profiles that the search has made already; nothing is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.plan import Estimate
from budgetfit.core.plan_curves import (
    BatchSizePoint,
    CheckpointingPoint,
    LazyCurves,
    PlanCurves,
)
from budgetfit.core.recipe import Segment
from budgetfit.memory.category_bytes import category_bytes
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.memory.snapshot import Snapshot, step_snapshot
from budgetfit.planning.search.policies import policy_segments, solver_for
from budgetfit.planning.search.solver_choice import (
    MAX_SEGMENT,
    fastest_plan,
    fastest_plan_bounds,
    without_host_options,
)
from budgetfit.solvers.batch_size import choose_batch_size
from budgetfit.solvers.batch_size_grid import fitting_batch_sizes
from budgetfit.solvers.chain_dp import pareto_front
from budgetfit.solvers.problem import Problem
from budgetfit.tracing.isolation.torch_state import neutral_torch_state
from budgetfit.utils.garbage_collection import freeze_gc

if TYPE_CHECKING:
    from budgetfit.planning.session import PlanningSession

PRACTICES: Final = (
    ("no checkpointing", "none"),
    ("every 2nd block recomputed", "every-2"),
    ("every block recomputed", "full"),
)
MAX_FRONT_POINTS: Final = 40
MAX_FRONT_LABELS: Final = 300  # per block: a picture needs no more
MAX_BATCH_SIZES: Final = 12
NS_PER_S: Final = 1e9
NS_PER_MS: Final = 1e6

Item = TypeVar("Item")


class Scale(NamedTuple):
    """Replay's numbers of the plan against the formula's, for points around it.

    ``more_bytes`` is added to peaks, ``time`` multiplies times.
    """

    more_bytes: int
    time: float


def lazy_curves(session: PlanningSession, estimate: Estimate) -> LazyCurves:
    """Return ``plan_curves``, evaluated once and not before it is asked for."""

    @functools.cache  # shared by the plan and its changed copies
    @neutral_torch_state()
    @freeze_gc()
    def curves() -> PlanCurves:
        return plan_curves(session, estimate)

    @neutral_torch_state()
    @freeze_gc()
    def snapshot() -> Snapshot:
        line, recipe = estimate.timeline, estimate.recipe
        return step_snapshot(
            session.traces.exact(recipe),
            recipe.batch_size,
            session.workload.gpu,
            step=line.points[line.peak].step,
            settings=session.budget.allocator,
            micro_steps=recipe.gradient_accumulation_steps,
        )

    return LazyCurves(curves, snapshot)


def plan_curves(session: PlanningSession, estimate: Estimate) -> PlanCurves:
    """Return memory over time, and the choices around a plan.

    Args:
        session: The one that found it.
        estimate: The plan's.
    """
    recipe = estimate.recipe
    chain = session.block_chain.profile_at(recipe.batch_size)
    formula_bytes = chain_peak_bytes(chain, recipe.segments)
    usable = session.budget.usable_bytes
    spare = usable - estimate.reserved_bytes
    limit_bytes = min(formula_bytes + spare, max(formula_bytes, usable))
    scale = Scale(
        more_bytes=estimate.allocated_bytes - formula_bytes,
        time=estimate.step_ms * NS_PER_MS / _step_ns(chain, recipe.segments, estimate),
    )
    return PlanCurves(
        category_bytes=_category_bytes(session, estimate),
        limit_bytes=limit_bytes + scale.more_bytes,
        plan=CheckpointingPoint(
            peak_bytes=estimate.allocated_bytes,
            samples_per_s=estimate.samples_per_s,
            segments=recipe.segments,
        ),
        front=_front(chain, estimate, scale),
        practices=_practices(session, chain, estimate, scale),
        batch_sizes=_batch_sizes(session, estimate, limit_bytes, scale),
    )


def _category_bytes(
    session: PlanningSession, estimate: Estimate
) -> tuple[dict[str, int], ...]:
    """Repeat the plan's replay; empty where it was of another program."""
    recipe = estimate.recipe
    found = category_bytes(
        session.traces.exact(recipe),
        recipe.batch_size,
        session.workload.gpu,
        settings=session.budget.allocator,
        micro_steps=recipe.gradient_accumulation_steps,
    )
    known = [point.allocated_bytes for point in estimate.timeline.points]
    return found if [sum(row.values()) for row in found] == known else ()


def _front(
    chain: ChainProfile, estimate: Estimate, scale: Scale
) -> tuple[CheckpointingPoint, ...]:
    """Return the Pareto front, from the fastest to the lowest in memory."""
    if not estimate.recipe.offloads_activations:
        chain = without_host_options(chain)
    problem = Problem(
        chain=chain, limit_bytes=chain_peak_bytes(chain, ()), max_segment=MAX_SEGMENT
    )
    found = pareto_front(problem, MAX_FRONT_LABELS)
    segments = [row.segments for row in found if row.segments is not None]
    return tuple(
        _point(chain, each, estimate, scale)
        for each in _thinned(segments, MAX_FRONT_POINTS)
    )


def _practices(
    session: PlanningSession, chain: ChainProfile, estimate: Estimate, scale: Scale
) -> tuple[CheckpointingPoint, ...]:
    """Return the usual practices at the plan's batch size."""
    policies = PRACTICES if session.workload.blocks else PRACTICES[:1]
    size = estimate.recipe.batch_size
    return tuple(
        _point(
            chain,
            policy_segments(session.block_chain, policy, size),
            estimate,
            scale,
            label,
        )
        for label, policy in policies
    )


def _point(
    chain: ChainProfile,
    segments: tuple[Segment, ...],
    estimate: Estimate,
    scale: Scale,
    label: str = "",
) -> CheckpointingPoint:
    step_ns = _step_ns(chain, segments, estimate) * scale.time
    return CheckpointingPoint(
        label=label,
        peak_bytes=chain_peak_bytes(chain, segments) + scale.more_bytes,
        samples_per_s=estimate.recipe.effective_batch_size * NS_PER_S / step_ns,
        segments=segments,
    )


def _step_ns(
    chain: ChainProfile, segments: tuple[Segment, ...], estimate: Estimate
) -> float:
    micro_batches = estimate.recipe.gradient_accumulation_steps
    return chain.step_ns(chain_time_ns(chain, segments), micro_batches)


def _batch_sizes(
    session: PlanningSession, estimate: Estimate, limit_bytes: int, scale: Scale
) -> tuple[BatchSizePoint, ...]:
    """Solve for some of the batch sizes that fit ``limit_bytes`` by the formula."""
    # The plan's own is among them, with the plan's numbers.
    asked = session.request.checkpointing
    solve = fastest_plan if asked == "auto" else solver_for(session)
    profile_at = session.block_chain.profiles_within(limit_bytes, exact_blocks=False)
    own, effective = estimate.recipe.batch_size, session.settings.effective_batch_size
    ranks = estimate.recipe.ranks

    def may_fit(size: int) -> bool:
        problem = Problem(chain=profile_at(size), limit_bytes=limit_bytes)
        if asked == "auto":
            return fastest_plan_bounds(problem).lower_ns is not None
        return solve(problem).segments is not None

    if session.request.batch_size is not None:
        return ()
    if effective is not None:
        most = min(effective, session.largest_taken)
        sizes = [size for size in range(1, most + 1) if effective % size == 0]
    else:
        sizes = fitting_batch_sizes(
            may_fit, session.smallest_searched, session.largest_searched
        )
    others = {*_thinned(sizes, MAX_BATCH_SIZES)} - {own}
    found = choose_batch_size(
        profile_at,
        solve,
        limit_bytes=limit_bytes,
        effective_batch_size=effective,
        batch_sizes=sorted(others),
        micro_batches=estimate.recipe.gradient_accumulation_steps,
    )
    points = [
        BatchSizePoint(
            batch_size=each.batch_size,
            gradient_accumulation_steps=each.gradient_accumulation_steps,
            peak_bytes=each.peak_bytes + scale.more_bytes,
            samples_per_s=ranks * NS_PER_S / float(each.ns_per_sample) / scale.time,
            segments=each.solution.segments or (),
        )
        for each in found.considered
        if each.peak_bytes is not None and each.ns_per_sample
    ]
    points.append(
        BatchSizePoint(
            batch_size=own,
            gradient_accumulation_steps=estimate.recipe.gradient_accumulation_steps,
            peak_bytes=estimate.allocated_bytes,
            samples_per_s=estimate.samples_per_s,
            segments=estimate.recipe.segments,
        )
    )
    return tuple(sorted(points, key=attrgetter("batch_size")))


def _thinned(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many, evenly, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]
