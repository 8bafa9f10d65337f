"""Limit pinned host memory in plans of solvers that count device memory only.

Where a solver's plan exceeds the limit, it solves again with fewer options, chosen in a
few ways that each guarantee the limit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from budgetfit.core.block_profile import BlockProfile, ChainProfile
from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_host_bytes
from budgetfit.solvers.problem import Problem, Solution

# Share of the limit for the largest options (offloaded blocks); the rest is for the
# smallest (a block's input).
SHARES: Final = (1.0, 0.5, 0.0)


def host_holds(chain: ChainProfile, segments: Sequence[Segment]) -> bool:
    """Whether the offloaded bytes of segments are within the chain's host limit.

    Raises:
        InputError: If a block has no such option.
    """
    limit_bytes = chain.host_limit_bytes
    return limit_bytes is None or chain_host_bytes(chain, segments) <= limit_bytes


def within_host_limit(
    problem: Problem,
    solve: Callable[[Problem], Solution],
    value: Callable[[Solution], float],
) -> Solution:
    """Return a solver's best plan within the chain's limit on host memory.

    ``value``: the objective to minimise, of solutions with segments.
    """
    found = solve(problem)
    limit_bytes = problem.chain.host_limit_bytes
    if (
        limit_bytes is None
        or found.segments is None
        or host_holds(problem.chain, found.segments)
    ):
        return found
    tried = [
        solve(replace(problem, chain=chain))
        for chain in chains_within(problem.chain, limit_bytes)
    ]
    fitting = [each for each in tried if each.segments is not None]
    if fitting:
        best = min(fitting, key=value)
        return replace(best, proven_optimal=False, lower_bound_ns=found.lower_bound_ns)
    return Solution(
        segments=None,
        proven_optimal=False,
        explanation="No plan was found within the limit on host memory.",
    )


def chains_within(chain: ChainProfile, limit_bytes: int) -> Iterator[ChainProfile]:
    """Yield chains with fewer options, so that no plan exceeds the limit."""
    # First blocks keep their options first: their saved tensors live longest. Another
    # chain has offloaded inputs at equal distances.
    most = [
        max((option.host_bytes for option in block.options), default=0)
        for block in chain.blocks
    ]
    least = [
        min((each.host_bytes for each in block.options if each.host_bytes), default=0)
        for block in chain.blocks
    ]
    seen = set()
    for share in SHARES:
        left, allowed = limit_bytes, []
        for large, small in zip(most, least, strict=True):
            spent = limit_bytes - left
            size = large if spent + large <= share * limit_bytes else small
            if size > left:
                size = 0
            left -= size
            allowed.append(size)
        seen.add(tuple(allowed))
    total = sum(least)
    if limit_bytes < total:
        apart = -(-total // max(limit_bytes, 1))
        seen.add(
            tuple(size if index % apart == 0 else 0 for index, size in enumerate(least))
        )
    for row in sorted(seen, reverse=True):
        if sum(row) <= limit_bytes:
            yield _limited(chain, row)


def _limited(chain: ChainProfile, allowed: Sequence[int]) -> ChainProfile:
    """Return the chain without options above each block's allowance."""

    def block(each: BlockProfile, most: int) -> BlockProfile:
        options = tuple(row for row in each.options if row.host_bytes <= most)
        return replace(each, options=options)

    blocks = (block(*pair) for pair in zip(chain.blocks, allowed, strict=True))
    return replace(chain, blocks=tuple(blocks))
