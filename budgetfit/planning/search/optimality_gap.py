"""The optimality gap of a plan at its batch size.

Reserved bytes are never less than live bytes. So no plan that fits is faster than the
fastest whose live bytes fit the budget, and that one is solved for exactly, or bounded
from below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from budgetfit.memory.chain.peak import chain_time_ns
from budgetfit.planning.search.solver_choice import MAX_SEGMENT
from budgetfit.solvers.chain_dp import chain_dp
from budgetfit.solvers.problem import Problem

if TYPE_CHECKING:
    from budgetfit.core.recipe import Recipe
    from budgetfit.planning.profiling.block_chain import BlockChain

SHOWN_AS_OPTIMAL: Final = 0.0005  # of a step's time: reported as no gap


def optimality_gap(
    block_chain: BlockChain, recipe: Recipe, usable_bytes: int
) -> float | None:
    """Return an upper bound on the share of a step's time that another plan could save.

    Among plans at this batch size, with the block options that were measured.

    Returns:
        At least 0; None where no bound is known.
    """
    chain = block_chain.profile_at(recipe.batch_size)
    problem = Problem(chain=chain, budget_bytes=usable_bytes, max_segment=MAX_SEGMENT)
    lower_ns = chain_dp(problem).lower_bound_ns
    if lower_ns is None:
        return None
    micro_steps = recipe.gradient_accumulation_steps
    taken, least = (
        time_ns * micro_steps + chain.optimizer_ns
        for time_ns in (chain_time_ns(chain, recipe.segments), lower_ns)
    )
    return max(0.0, 1 - least / taken) if taken else None


def optimality_text(block_chain: BlockChain, recipe: Recipe, usable_bytes: int) -> str:
    """Return the optimality gap as text; empty where no bound is known."""
    gap = optimality_gap(block_chain, recipe, usable_bytes)
    if gap is None:
        return ""
    if gap < SHOWN_AS_OPTIMAL:
        return "proven fastest at this batch size"
    return f"proven within {gap:.1%} of the fastest at this batch size"
