"""Which solver decides, with which options: simple forms before involved ones."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.batch_size import Bounds
from budgetfit.solvers.chain_dp import chain_dp, lowest_peak
from budgetfit.solvers.host_limit import within_host_limit
from budgetfit.solvers.lagrangian_bounds import NEVER, relaxation
from budgetfit.solvers.problem import Problem, Same, Solution, describe
from budgetfit.solvers.uniform_segments import fastest_uniform

if TYPE_CHECKING:
    from collections.abc import Callable

    from budgetfit.core.block_profile import BlockOption, ChainProfile

LONGEST_SEGMENT: Final = 8  # longer ones gain nothing on chains up to 126 blocks
HOST_GAIN: Final = 0.02  # of a step's time


def fastest(problem: Problem) -> Solution:
    """The fastest plan, in the simplest form that is as fast.

    Segments of one block are preferred to longer ones where they are as fast: they are
    a flag on the block, longer ones replace its forward. Host memory is used where that
    gains two per cent and more: the bus is shared, and machines differ in it. Two
    levels of recomputation are for budgets that nothing else meets.

    What it said of the last problems is remembered.
    """
    return _remembered(Same(problem.chain), problem.budget_bytes)


@lru_cache(maxsize=128)
def _remembered(same: Same, budget_bytes: int) -> Solution:
    problem = Problem(chain=same.chain, budget_bytes=budget_bytes)
    if _keeps_all(problem):
        return Solution(
            segments=(),
            proven_optimal=True,
            explanation=f"{describe(problem.chain, ())}, which nothing is faster than.",
            least_time_ns=chain_time_ns(problem.chain, ()),
        )
    on_device = replace(problem, chain=without_host(problem.chain))
    best = _simplest(on_device)
    if on_device.chain is not problem.chain and _loses(problem, best):
        with_host = within_host_limit(problem, _simplest, _time_in(problem.chain))
        if _gain(problem.chain, best, with_host) > HOST_GAIN:
            best = with_host
    if best.segments is None:
        nested = replace(problem, max_segment=LONGEST_SEGMENT, nested=True)
        best = within_host_limit(nested, _solved, _time_in(problem.chain))
    return best


def bounds_of_fastest(problem: Problem) -> Bounds:
    """Return bounds on what ``fastest`` answers, which take a tenth of the time."""
    plain_ns = chain_time_ns(problem.chain, ())
    if _keeps_all(problem):
        return Bounds(plain_ns, plain_ns)
    longer = replace(problem, max_segment=LONGEST_SEGMENT)
    device = relaxation(replace(longer, chain=without_host(problem.chain)))
    if device.most_ns >= NEVER:
        # Perhaps only two levels fit: their bound holds for one as well.
        longer = replace(longer, nested=True)
    found = relaxation(longer)
    if found.least_ns >= NEVER:
        return Bounds(None, None)
    least_ns, most_ns = plain_ns + found.least_ns, plain_ns + device.most_ns
    if device.most_ns < NEVER and least_ns >= (1 - HOST_GAIN) * most_ns:
        least_ns = plain_ns + device.least_ns  # host memory gains too little
    return Bounds(least_ns, most_ns if device.most_ns < NEVER else None)


def _keeps_all(problem: Problem) -> bool:
    return chain_peak_bytes(problem.chain, ()) <= problem.budget_bytes


def _loses(problem: Problem, best: Solution) -> bool:
    """Whether a plan loses more than what host memory has to gain."""
    if best.segments is None:
        return True
    bound = relaxation(replace(problem, max_segment=LONGEST_SEGMENT))
    least_ns = chain_time_ns(problem.chain, ()) + bound.least_ns
    return 1 - least_ns / chain_time_ns(problem.chain, best.segments) > HOST_GAIN


def _simplest(problem: Problem) -> Solution:
    """Return one-block segments unless longer ones are faster."""
    longer = _solved(replace(problem, max_segment=LONGEST_SEGMENT))
    if longer.segments is None or all(len(row.blocks) == 1 for row in longer.segments):
        return longer
    alone = replace(problem, max_segment=1)
    least_ns = chain_time_ns(problem.chain, ()) + relaxation(alone).least_ns
    if least_ns > chain_time_ns(problem.chain, longer.segments):
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


def without_host(chain: ChainProfile) -> ChainProfile:
    """Return the chain without the options that use host memory."""
    return _without_host(Same(chain))


@lru_cache(maxsize=64)
def _without_host(same: Same) -> ChainProfile:
    chain = same.chain

    def stays(option: BlockOption) -> bool:
        return option.mode != "offload" and not option.input_on_host

    if all(stays(option) for block in chain.blocks for option in block.options):
        return chain
    blocks = (
        replace(block, options=tuple(filter(stays, block.options)))
        for block in chain.blocks
    )
    return replace(chain, blocks=tuple(blocks))


def lowest_of_all(problem: Problem) -> Solution:
    """Return the lowest peak there is, two levels of recomputation included."""

    def peak_bytes(solution: Solution) -> float:
        return chain_peak_bytes(problem.chain, solution.segments or ())

    nested = replace(problem, max_segment=LONGEST_SEGMENT, nested=True)
    return within_host_limit(nested, lowest_peak, peak_bytes)
