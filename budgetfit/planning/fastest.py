"""Which solver decides, with which options: simple forms before involved ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from budgetfit.memory.chain_peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.chain_dp import chain_dp, lowest_peak
from budgetfit.solvers.problem import Solution, describe
from budgetfit.solvers.uniform_segments import fastest_uniform

if TYPE_CHECKING:
    from budgetfit.core.block_profile import BlockOption, ChainProfile
    from budgetfit.solvers.problem import Problem

LONGEST_SEGMENT: Final = 8  # longer ones gain nothing on chains up to 126 blocks
HOST_GAIN: Final = 0.02  # of a step's time


def fastest(problem: Problem) -> Solution:
    """The fastest plan, in the simplest form that is as fast.

    Segments of one block are preferred to longer ones where they are as fast: they are
    a flag on the block, longer ones replace its forward. Host memory is used where that
    gains two per cent and more: the bus is shared, and machines differ in it. Two
    levels of recomputation are for budgets that nothing else meets.
    """
    if chain_peak_bytes(problem.chain, ()) <= problem.budget_bytes:
        return Solution(
            segments=(),
            proven_optimal=True,
            explanation=f"{describe(problem.chain, ())}, which nothing is faster than.",
            least_time_ns=chain_time_ns(problem.chain, ()),
        )
    on_device = replace(problem, chain=without_host(problem.chain))
    best = _simplest(on_device)
    if on_device.chain is not problem.chain and _loses(problem.chain, best):
        with_host = _simplest(problem)
        if _gain(problem.chain, best, with_host) > HOST_GAIN:
            best = with_host
    if best.segments is None:
        nested = replace(problem, max_segment=LONGEST_SEGMENT, nested=True)
        best = _solved(nested)
    return best


def _loses(chain: ChainProfile, best: Solution) -> bool:
    """Whether a plan's own extra time is more than host memory has to gain."""
    if best.segments is None:
        return True
    return 1 - chain_time_ns(chain, ()) / chain_time_ns(chain, best.segments) > (
        HOST_GAIN
    )


def _simplest(problem: Problem) -> Solution:
    """Return one-block segments unless longer ones are faster."""
    longer = _solved(replace(problem, max_segment=LONGEST_SEGMENT))
    if longer.segments is None or all(len(row.blocks) == 1 for row in longer.segments):
        return longer
    single = chain_dp(replace(problem, max_segment=1))
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


def without_host(chain: ChainProfile) -> ChainProfile:
    """Return the chain without the options that use host memory."""

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
    return lowest_peak(replace(problem, max_segment=LONGEST_SEGMENT, nested=True))
