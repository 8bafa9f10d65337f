"""Every plan there is, each with the chain formula: the yardstick for small chains.

It shares nothing with the other solvers but the formula itself (``memory.chain_peak``).
"""

from collections.abc import Iterator
from typing import Final

from budgetfit.core.recipe import Segment
from budgetfit.memory.chain_peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.problem import (
    Problem,
    Solution,
    describe,
    segment,
    wrapped_count,
)

# 2.4 to 2.6 times as many with each block: 12 blocks in segments of any length.
MOST_PLANS: Final = 100_000


def exhaustive(problem: Problem) -> Solution:
    """Return the fastest plan within the budget by trying all of them.

    Of equally fast ones the one with the lower peak, then with fewer wrapped blocks,
    then the first in the order of ``all_plans``.
    """
    count = count_plans(problem)
    if count > MOST_PLANS:
        return Solution(
            segments=None,
            proven_optimal=False,
            explanation=f"{count:,} plans are too many to try all of them.",
        )
    chain = problem.chain
    fitting = (
        ((chain_time_ns(chain, plan), peak_bytes, wrapped_count(plan)), plan)
        for plan in all_plans(problem)
        if (peak_bytes := chain_peak_bytes(chain, plan)) <= problem.budget_bytes
    )
    best = min(fitting, key=lambda rated: rated[0], default=None)
    if best is None:
        return Solution(
            segments=None,
            proven_optimal=True,
            explanation=f"None of all {count:,} plans is within the budget.",
        )
    plan = best[1]
    return Solution(
        segments=plan,
        proven_optimal=True,
        explanation=f"{describe(chain, plan)}; all {count:,} plans were tried.",
    )


def all_plans(problem: Problem, start: int = 0) -> Iterator[tuple[Segment, ...]]:
    """Yield every way to keep or recompute the blocks from block ``start`` on.

    Wrapping a block comes before keeping it, a short segment before a long one.
    """
    if start == len(problem.chain.blocks):
        yield ()
        return
    for length in range(1, problem.longest_segment(start) + 1):
        first = segment(problem.chain, start, length)
        for others in all_plans(problem, start + length):
            yield (first, *others)
    yield from all_plans(problem, start + 1)


def count_plans(problem: Problem) -> int:
    """Return how many plans ``all_plans`` yields, without making them."""
    counts = [1]  # counts[-1 - k]: from k blocks further on
    for start in range(len(problem.chain.blocks) - 1, -1, -1):
        longest = problem.longest_segment(start)
        counts.append(
            counts[-1] + sum(counts[-length] for length in range(1, longest + 1))
        )
    return counts[-1]
