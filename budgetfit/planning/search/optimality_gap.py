"""How far from the best possible a plan can be at its batch size.

What is reserved is never less than what is live. So no plan that fits is faster than
the fastest whose live bytes alone fill the budget, and that one is solved for exactly,
or bounded from below (solver S2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from budgetfit.memory.chain.peak import chain_time_ns
from budgetfit.planning.search.solver_choice import LONGEST_SEGMENT
from budgetfit.solvers.chain_dp import chain_dp
from budgetfit.solvers.problem import Problem

if TYPE_CHECKING:
    from budgetfit.core.recipe import Recipe
    from budgetfit.planning.profiling.block_chain import Chains

NOTHING: Final = 0.0005  # of a step's time: shown as none


def optimality_gap(chains: Chains, recipe: Recipe, usable_bytes: int) -> float | None:
    """Return the share of a step's time that no plan at this batch size can save.

    Of plans with whole blocks as steps: op sets other than those that were tried are
    not in it.

    Returns:
        At least 0; None where nothing is known.
    """
    chain = chains.at(recipe.batch_size)
    problem = Problem(
        chain=chain, budget_bytes=usable_bytes, max_segment=LONGEST_SEGMENT
    )
    least_ns = chain_dp(problem).least_time_ns
    if least_ns is None:
        return None
    micro_steps = recipe.gradient_accumulation_steps
    taken, least = (
        time_ns * micro_steps + chain.optimizer_ns
        for time_ns in (chain_time_ns(chain, recipe.segments), least_ns)
    )
    return max(0.0, 1 - least / taken) if taken else None


def certificate(chains: Chains, recipe: Recipe, usable_bytes: int) -> str:
    """Return the same in words; empty where nothing is known."""
    gap = optimality_gap(chains, recipe, usable_bytes)
    if gap is None:
        return ""
    if gap < NOTHING:
        return "proven fastest at this batch size"
    return f"proven within {gap:.1%} of the fastest at this batch size"
