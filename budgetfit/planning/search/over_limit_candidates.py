"""Candidates above the solver's limit of live bytes that may fit all the same.

The limit leaves room for what the allocator reserves beyond live bytes, by an estimate
for all plans. Some plans reserve less. Those that are faster than the best one found,
and whose live bytes fit, are judged: as many as are cheap to trace.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from budgetfit.memory.chain.peak import chain_host_bytes, chain_time_ns
from budgetfit.planning.search.solver_choice import MAX_SEGMENT, without_host_options
from budgetfit.solvers.chain_dp import pareto_front
from budgetfit.solvers.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.core.recipe import Recipe
    from budgetfit.planning.profiling.block_chain import BlockChain

# Each costs a trace. So many traced ops take a few seconds: models of a few blocks get
# a dozen candidates and deep ones one or two.
MAX_TRACED_OPS: Final = 20_000
# Pareto fronts are long where blocks all differ; beyond this they are thinned.
MAX_FRONT_LABELS: Final = 2_000


def over_limit_candidates(
    block_chain: BlockChain, found: Recipe, usable_bytes: int, most: int | None = None
) -> Iterator[tuple[Recipe, str]]:
    """Yield recipes that are faster than ``found``, the most likely to fit first.

    Args:
        block_chain: Gives the profile at the batch size of ``found``.
        found: The best recipe so far.
        usable_bytes: Limit of live bytes.
        most: Most recipes to yield; None for as many as are cheap.
    """
    # Loss chunks add few ops, so that the trace without them is counted.
    count = MAX_TRACED_OPS // max(1, block_chain.op_count(found.batch_size))
    count = count if most is None else min(count, most)
    if count < 1:
        return
    chain = without_host_options(block_chain.profile_at(found.batch_size))
    problem = Problem(chain=chain, budget_bytes=usable_bytes, max_segment=MAX_SEGMENT)
    if any(row.mode == "offload" or row.input_on_host for row in found.segments):
        problem = replace(problem, chain=block_chain.profile_at(found.batch_size))
    limit_ns = chain_time_ns(problem.chain, found.segments)
    front = pareto_front(problem, MAX_FRONT_LABELS, faster_than_ns=limit_ns)
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
        recipe = block_chain.settings.recipe(found.batch_size, solution.segments or ())
        yield recipe, solution.explanation
