"""Exhaustive search over all plans: the reference solver for small chains.

It shares only the chain formula (``memory.chain.peak``) with the other solvers.
"""

from collections.abc import Iterator
from typing import Final

from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.problem import (
    Problem,
    Solution,
    describe,
    segment,
    segment_variants,
    single_segment,
    wrapped_count,
)

# Grows by 2.4 to 2.6 with each block: 12 blocks in segments of any length.
MAX_PLANS: Final = 100_000


def exhaustive(problem: Problem) -> Solution:
    """Return the fastest plan within the budget by trying all of them.

    Of equally fast ones the one with the lower peak, then with fewer wrapped blocks,
    then the first in the order of ``all_plans``.
    """
    count = count_plans(problem)
    if count > MAX_PLANS:
        return Solution(
            segments=None,
            proven_optimal=False,
            explanation=f"{count:,} plans are too many to try all of them.",
        )
    chain = problem.chain
    fitting = (
        ((chain_time_ns(chain, plan), peak_bytes, wrapped_count(plan)), plan)
        for plan in all_plans(problem)
        if (peak_bytes := chain_peak_bytes(chain, plan)) <= problem.limit_bytes
    )
    best = min(fitting, key=lambda rated: rated[0], default=None)
    if best is None:
        return Solution(
            segments=None,
            proven_optimal=True,
            explanation=f"None of all {count:,} plans is within the budget.",
        )
    (time_ns, _, _), plan = best
    return Solution(
        segments=plan,
        proven_optimal=True,
        lower_bound_ns=time_ns,
        explanation=f"{describe(chain, plan)}; all {count:,} plans were tried.",
    )


def all_plans(problem: Problem, start: int = 0) -> Iterator[tuple[Segment, ...]]:
    """Yield every plan of the blocks from block ``start`` on.

    Wrapping a block comes before keeping it, in the order of ``segments_from``.
    """
    if start == len(problem.chain.blocks):
        yield ()
        return
    for first in segments_from(problem, start):
        for others in all_plans(problem, start + len(first.blocks)):
            yield (first, *others)
    yield from all_plans(problem, start + 1)


def segments_from(problem: Problem, start: int) -> Iterator[Segment]:
    """Yield every segment that may start at a block, in index order.

    First the options of the single block, in their order; then ever longer segments,
    each plain, with its input on the host, nested, and both.
    """
    block = problem.chain.blocks[start]
    for option in block.options:
        if option.mode != "keep":
            yield single_segment(block, option)
    longest = problem.longest_segment(start)
    for length in range(2, longest + 1):
        for nested, input_on_host in segment_variants(problem, start):
            yield segment(
                problem.chain, start, length, nested=nested, input_on_host=input_on_host
            )


def count_plans(problem: Problem) -> int:
    """Return the number of plans that ``all_plans`` yields."""
    counts = [1]  # counts[-1 - k]: from k blocks further on
    for start in range(len(problem.chain.blocks) - 1, -1, -1):
        lengths = [len(each.blocks) for each in segments_from(problem, start)]
        counts.append(counts[-1] + sum(counts[-length] for length in lengths))
    return counts[-1]
