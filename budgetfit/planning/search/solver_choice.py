"""Choose the solver and its options: simple forms of plans before complex ones.

The optimality gap of a plan at its batch size: reserved bytes are never less than live
bytes. So no plan that fits is faster than the fastest whose live bytes fit the budget,
and that one is solved for exactly, or bounded from below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from budgetfit.core.block_profile import BlockOption, ChainProfile
from budgetfit.core.plan import Estimate
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.batch_size import Bounds
from budgetfit.solvers.chain_dp import chain_dp, lowest_peak
from budgetfit.solvers.host_limit import within_host_limit
from budgetfit.solvers.lagrangian_bounds import INFEASIBLE_NS, lagrangian_bounds
from budgetfit.solvers.problem import Problem, Solution, describe
from budgetfit.solvers.regular_order import in_regular_order
from budgetfit.solvers.uniform_segments import fastest_uniform

if TYPE_CHECKING:
    from budgetfit.planning.session import PlanningSession

MAX_SEGMENT: Final = 8  # blocks; longer segments gain nothing up to 126 blocks
MIN_HOST_GAIN: Final = 0.02  # of a step's time
SHOWN_AS_OPTIMAL: Final = 0.0005  # of a step's time: reported as no gap
_PROVEN: Final = "by these times no other checkpointing of this batch size is"


@lru_cache(maxsize=128)
def fastest_plan(problem: Problem) -> Solution:
    """Return the fastest plan, in the simplest form that is as fast."""
    # Segments of one block are preferred to longer ones where they are as fast: they
    # are a flag on the block, longer ones replace its forward. Host memory is used
    # where that gains two per cent or more: the bus is shared, and machines differ in
    # it. Nested recomputation is for budgets that nothing else meets. Results are
    # cached.
    if _keeps_all(problem):
        return Solution(
            segments=(),
            proven_optimal=True,
            explanation=f"{describe(problem.chain, ())}, which nothing is faster than.",
            lower_bound_ns=chain_time_ns(problem.chain, ()),
        )
    on_device = replace(problem, chain=without_host_options(problem.chain))
    best = _simplest(on_device)
    if on_device.chain is not problem.chain and _loses(problem, best):
        with_host = within_host_limit(problem, _simplest, _time_in(problem.chain))
        if _gain(problem.chain, best, with_host) > MIN_HOST_GAIN:
            best = with_host
    if best.segments is None:
        nested = replace(problem, max_segment=MAX_SEGMENT, nested=True)
        best = within_host_limit(nested, _solved, _time_in(problem.chain))
    return in_regular_order(problem, best)


def fastest_plan_bounds(problem: Problem) -> Bounds:
    """Return bounds on the time of ``fastest_plan``, in a tenth of its run time."""
    plain_ns = chain_time_ns(problem.chain, ())
    if _keeps_all(problem):
        return Bounds(plain_ns, plain_ns)
    longer = replace(problem, max_segment=MAX_SEGMENT)
    device = lagrangian_bounds(
        replace(longer, chain=without_host_options(problem.chain))
    )
    if device.upper_ns >= INFEASIBLE_NS:
        # Perhaps only nested plans fit: their bound holds for the others as well.
        longer = replace(longer, nested=True)
    found = lagrangian_bounds(longer)
    if found.lower_ns >= INFEASIBLE_NS:
        return Bounds(None, None)
    lower_ns, upper_ns = plain_ns + found.lower_ns, plain_ns + device.upper_ns
    if device.upper_ns < INFEASIBLE_NS and lower_ns >= (1 - MIN_HOST_GAIN) * upper_ns:
        lower_ns = plain_ns + device.lower_ns  # host memory gains too little
    return Bounds(lower_ns, upper_ns if device.upper_ns < INFEASIBLE_NS else None)


def _keeps_all(problem: Problem) -> bool:
    return chain_peak_bytes(problem.chain, ()) <= problem.limit_bytes


def _loses(problem: Problem, best: Solution) -> bool:
    """Whether offloading could save more than ``MIN_HOST_GAIN`` of a plan's time."""
    if best.segments is None:
        return True
    bound = lagrangian_bounds(replace(problem, max_segment=MAX_SEGMENT))
    lower_ns = chain_time_ns(problem.chain, ()) + bound.lower_ns
    return 1 - lower_ns / chain_time_ns(problem.chain, best.segments) > MIN_HOST_GAIN


def _simplest(problem: Problem) -> Solution:
    """Return one-block segments unless longer ones are faster."""
    longer = _solved(replace(problem, max_segment=MAX_SEGMENT))
    if longer.segments is None or all(len(row.blocks) == 1 for row in longer.segments):
        return longer
    alone = replace(problem, max_segment=1)
    lower_ns = chain_time_ns(problem.chain, ()) + lagrangian_bounds(alone).lower_ns
    if lower_ns > chain_time_ns(problem.chain, longer.segments):
        return longer
    single = chain_dp(alone)
    return longer if _gain(problem.chain, single, longer) > 0 else single


def _solved(problem: Problem) -> Solution:
    """Return the solver's plan; where it gives up, the best single segment length."""
    solution = chain_dp(problem)
    if solution.segments is None and not solution.proven_optimal:
        return fastest_uniform(problem)
    return solution


def _gain(chain: ChainProfile, old: Solution, new: Solution) -> float:
    """Return the share of the old plan's time that the new one saves."""
    if new.segments is None:
        return 0.0
    if old.segments is None:
        return 1.0
    old_ns = chain_time_ns(chain, old.segments)
    return 1 - chain_time_ns(chain, new.segments) / old_ns if old_ns else 0.0


def _time_in(chain: ChainProfile) -> Callable[[Solution], float]:
    return lambda solution: chain_time_ns(chain, solution.segments or ())


@lru_cache(maxsize=64)
def without_host_options(chain: ChainProfile) -> ChainProfile:
    """Return the chain without options that use host memory (offload)."""

    def stays(option: BlockOption) -> bool:
        return option.mode != "offload" and not option.input_on_host

    if all(stays(option) for block in chain.blocks for option in block.options):
        return chain
    blocks = (
        replace(block, options=tuple(filter(stays, block.options)))
        for block in chain.blocks
    )
    return replace(chain, blocks=tuple(blocks))


def lowest_peak_nested(problem: Problem) -> Solution:
    """Return the plan of lowest peak, nested recomputation included."""

    def peak_bytes(solution: Solution) -> float:
        return chain_peak_bytes(problem.chain, solution.segments or ())

    nested = replace(problem, max_segment=MAX_SEGMENT, nested=True)
    return within_host_limit(nested, lowest_peak, peak_bytes)


def solver_ns(estimate: Estimate) -> float:
    """Return the time per sample of a rank as the solver counts it: not calibrated."""
    kernels_ms = (estimate.step_ms - estimate.network_ms) / estimate.time_factor
    return (kernels_ms + estimate.network_ms) * 1e6 / estimate.recipe.samples_per_rank


def optimality_gap(session: PlanningSession, estimate: Estimate) -> float | None:
    """Return an upper bound on the share of a step's time that another plan could save.

    Among plans at this batch size, with the block options that were measured. A chain's
    sum is at most what the judge says of a plan: the judge's time of this one, and the
    least sum of any other.

    Returns:
        At least 0; None where no bound is known.
    """
    recipe = estimate.recipe
    if not recipe.segments:
        return 0.0
    chain = session.block_chain.bounding_profile_at(recipe.batch_size)
    problem = Problem(
        chain=chain, limit_bytes=session.budget.usable_bytes, max_segment=MAX_SEGMENT
    )
    lower_ns = chain_dp(problem).lower_bound_ns
    if lower_ns is None:
        return None
    least_ns = chain.step_ns(lower_ns, recipe.gradient_accumulation_steps)
    taken_ns = solver_ns(estimate) * recipe.samples_per_rank
    return max(0.0, 1 - least_ns / taken_ns) if taken_ns else None


def optimality_text(session: PlanningSession, estimate: Estimate) -> str:
    """Return the optimality gap as text; empty where no bound is known."""
    gap = optimality_gap(session, estimate)
    if gap is None:
        return ""
    if gap < SHOWN_AS_OPTIMAL:
        return f"{_PROVEN} faster (proven)"
    return f"{_PROVEN} over {100 * gap:.1f} % faster (proven)"
