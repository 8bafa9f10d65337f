"""Uniform segments: Chen's sqrt(n) checkpointing, and every other length.

Chen et al. 2016 (arXiv 1604.06174) cut n layers into about sqrt(n) segments. That
counts saved tensors as equal. A transformer block saves about 17 times its input, so
segments of sqrt(n) blocks hold far more while recomputed than they save before that:
24 blocks peak at 90 block inputs, one block per segment at 41. The best uniform length
is near sqrt(n * input / saved).
"""

import math
from collections.abc import Iterator

from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.problem import (
    Problem,
    Solution,
    describe,
    longest_segment,
    segment,
    wrapped_count,
)


def uniform_segments(chain: ChainProfile, length: int) -> tuple[Segment, ...]:
    """Return the plan that recomputes every possible block, ``length`` to a segment."""
    # Segments are shorter at the end, before a block that must not be wrapped, and
    # before one that does not take the previous output as its input.
    segments = []
    start = 0
    while start < len(chain.blocks):
        longest = longest_segment(chain, start, length)
        if longest:
            segments.append(segment(chain, start, longest))
        start += max(1, longest)
    return tuple(segments)


def chen_segments(chain: ChainProfile) -> tuple[Segment, ...]:
    """Return Chen's plan: ceil(sqrt(n)) blocks to a segment."""
    # n is the number of blocks that can be wrapped; without any the plan is empty.
    wrappable = sum(block.option("recompute") is not None for block in chain.blocks)
    return uniform_segments(chain, max(1, math.ceil(math.sqrt(wrappable))))


def every_uniform_length(problem: Problem) -> Iterator[tuple[int, tuple[Segment, ...]]]:
    """Yield each length up to the longest segment possible, with its plan."""
    starts = range(len(problem.chain.blocks))
    longest = max((problem.longest_segment(start) for start in starts), default=0)
    for length in range(1, longest + 1):
        yield length, uniform_segments(problem.chain, length)


def best_uniform_segments(problem: Problem) -> tuple[Segment, ...]:
    """Return the uniform plan of lowest peak, within the budget or not."""
    # Of equal ones the fastest, then the shortest segments; ``()`` where no block can
    # be wrapped.
    chain = problem.chain
    rated = (
        (chain_peak_bytes(chain, plan), chain_time_ns(chain, plan), length, plan)
        for length, plan in every_uniform_length(problem)
    )
    return min(rated, key=lambda each: each[:3], default=(0, 0, 0, ()))[3]


def fastest_uniform(problem: Problem) -> Solution:
    """Return the fastest plan of uniform segments, or the one that keeps everything."""
    # Of equally fast ones the one of lowest peak, then with fewer wrapped blocks, then
    # of the shortest segments. Nothing is proven.
    chain = problem.chain
    fitting = (
        ((chain_time_ns(chain, plan), peak_bytes, wrapped_count(plan), length), plan)
        for length, plan in ((0, ()), *every_uniform_length(problem))
        if (peak_bytes := chain_peak_bytes(chain, plan)) <= problem.limit_bytes
    )
    best = min(fitting, key=lambda rated: rated[0], default=None)
    if best is None:
        return Solution(
            segments=None,
            proven_optimal=False,
            explanation="No single segment length is within the budget.",
        )
    return Solution(
        segments=best[1],
        proven_optimal=False,
        explanation=f"{describe(chain, best[1])}; the fastest single segment length.",
    )
