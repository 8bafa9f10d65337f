"""Plans within a limit on pinned host memory, by solvers that count device memory only.

Where a solver's own plan takes more host memory than there is, it is asked again with
options left out, in a few ways that each keep within the limit whatever it chooses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from budgetfit.memory.chain.peak import chain_host_bytes
from budgetfit.solvers.problem import Problem, Solution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from budgetfit.core.block_profile import BlockProfile, ChainProfile
    from budgetfit.core.recipe import Segment

# How much of the limit may go to the options that take most (whole blocks); the rest is
# for those that take least (a block's input).
SHARES: Final = (1.0, 0.5, 0.0)


def host_holds(chain: ChainProfile, segments: Sequence[Segment]) -> bool:
    """Whether what segments offload is within the chain's limit.

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
    """Return a solver's plan if the host can hold it, else the best that it can hold.

    Args:
        problem: Its chain has the limit.
        solve: Any solver.
        value: What to minimise, of solutions with segments.
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
        return replace(best, proven_optimal=False, least_time_ns=found.least_time_ns)
    return Solution(
        segments=None,
        proven_optimal=False,
        explanation="No plan was found within the limit on host memory.",
    )


def chains_within(chain: ChainProfile, limit_bytes: int) -> Iterator[ChainProfile]:
    """Yield chains with so few options that no plan goes beyond the limit.

    First blocks come first: what they save lives longest. Then starts of segments at
    equal distances.
    """
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
    """Return the chain without options that take more than a block is allowed."""

    def block(each: BlockProfile, most: int) -> BlockProfile:
        options = tuple(row for row in each.options if row.host_bytes <= most)
        return replace(each, options=options)

    blocks = (block(*pair) for pair in zip(chain.blocks, allowed, strict=True))
    return replace(chain, blocks=tuple(blocks))
