"""Plans that the solver's limit left out and that may fit all the same.

The limit leaves room for what the allocator reserves beyond live bytes, by a guess that
holds for plans in general. Some plans reserve less. Those that are faster than the best
one found, and whose live bytes fit, are for the judge to look at: as many as are cheap.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from budgetfit.memory.chain.peak import chain_host_bytes, chain_time_ns
from budgetfit.planning.search.solver_choice import LONGEST_SEGMENT, without_host
from budgetfit.solvers.chain_dp import pareto_front
from budgetfit.solvers.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.core.recipe import Recipe
    from budgetfit.planning.profiling.block_chain import Chains

# Each costs a trace. A trace of so many ops takes a few seconds, so models of a few
# blocks get a dozen more and deep ones one or two.
MOST_OPS: Final = 20_000
# Fronts are long where blocks all differ; beyond this they are thinned.
MOST_LABELS: Final = 2_000


def near_misses(
    chains: Chains, found: Recipe, usable_bytes: int, most: int | None = None
) -> Iterator[tuple[Recipe, str]]:
    """Yield recipes that are faster than ``found``, the likeliest to fit first.

    Args:
        chains: The session's chains.
        found: The best recipe so far; the batch size stays.
        usable_bytes: What live bytes must not exceed.
        most: Most recipes to yield; None for what is cheap.
    """
    # Cutting the loss in parts changes few ops: its own trace is not worth making here.
    count = MOST_OPS // max(1, chains.op_count(found.batch_size))
    count = count if most is None else min(count, most)
    if count < 1:
        return
    chain = without_host(chains.at(found.batch_size))
    problem = Problem(
        chain=chain, budget_bytes=usable_bytes, max_segment=LONGEST_SEGMENT
    )
    if any(row.mode == "offload" or row.input_on_host for row in found.segments):
        problem = replace(problem, chain=chains.at(found.batch_size))
    limit_ns = chain_time_ns(problem.chain, found.segments)
    front = pareto_front(problem, MOST_LABELS, faster_than_ns=limit_ns)
    faster = [solution for solution in front if solution.segments is not None]
    # Slowest first: the front falls in bytes as it rises in time.
    ascending = reversed(faster)
    limit_bytes = problem.chain.host_limit_bytes
    held = (
        solution
        for solution in ascending
        if limit_bytes is None
        or chain_host_bytes(problem.chain, solution.segments or ()) <= limit_bytes
    )
    for solution in islice(held, count):
        recipe = chains.setting.recipe(found.batch_size, solution.segments or ())
        yield recipe, solution.explanation
