"""The rows beside a plan: usual practices, other objectives, and levers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.core.plan import Alternative
from budgetfit.planning.alternatives.training_changes import lever_rows
from budgetfit.planning.profiling.block_chain import Chains
from budgetfit.planning.search.baselines import (
    EVERY_NTH,
    PRACTICES,
    best,
    best_of_policy,
)
from budgetfit.planning.search.every_nth_block import SOLVED, ordinal, which_nth
from budgetfit.planning.search.loss_chunking import (
    search_with_loss_parts,
)
from budgetfit.planning.search.lowest_peak import smallest
from budgetfit.planning.search.search import Request, search

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.solvers.batch_size import Objective

OBJECTIVES: tuple[tuple[str, Objective], ...] = (
    ("fastest", "throughput"),
    ("largest batch", "batch_size"),
    ("lowest memory", "memory"),
)
OBJECTIVE_ROUNDS = 2  # recipes that are judged for each other objective


def alternatives(
    chains: Chains, request: Request, budget: Budget, plan: Estimate
) -> tuple[Alternative, ...]:
    """Return the usual practices, the other objectives, and levers on training.

    Each is at its own best batch, judged like the plan.
    """
    first = decisive_rows(chains, request, budget)
    return (*first, *further_rows(chains, request, budget, plan, first))


def decisive_rows(
    chains: Chains, request: Request, budget: Budget
) -> tuple[Alternative, ...]:
    """Return the usual practices that may come out ahead of what the solver proposes.

    Chen's segments never recompute less than the solver's, so they can win memory only.
    """
    shown = PRACTICES if request.objective != "throughput" else PRACTICES[:-1]
    return _practices(chains, request, budget, shown)


def further_rows(
    chains: Chains,
    request: Request,
    budget: Budget,
    plan: Estimate,
    first: tuple[Alternative, ...],
) -> tuple[Alternative, ...]:
    """Return the alternatives that decide nothing; ``first`` are those that did."""
    shown = [row.label for row in first]
    # Where nothing has to be recomputed, every n-th block need not be either.
    usual = (*PRACTICES, EVERY_NTH) if plan.recipe.segments else PRACTICES
    others = tuple(pair for pair in usual if pair[0] not in shown)
    rest = _practices(chains, request, budget, others)
    return (
        *rest,
        *_without_host(chains, request, budget, plan),
        *_other_objectives(chains, request, budget, [*first, *rest]),
        *lever_rows(chains, request, budget, plan),
    )


def _without_host(
    chains: Chains, request: Request, budget: Budget, plan: Estimate
) -> tuple[Alternative, ...]:
    """Return the best plan that leaves host memory alone, where the plan does not."""
    if not plan.host_bytes:
        return ()
    setting = replace(chains.setting, loss_chunks=1, host_ram_bytes=0)
    on_device = Chains(chains.traces, setting)
    own_chain, found = search_with_loss_parts(on_device, request, budget)
    estimate = found.estimate or smallest(own_chain, request, budget)
    label = "without host memory"
    return (Alternative(label=label, estimate=estimate, fits=bool(estimate.fits)),)


def _practices(
    chains: Chains,
    request: Request,
    budget: Budget,
    shown: tuple[tuple[str, str], ...],
) -> tuple[Alternative, ...]:
    blocks = chains.traces.subject.blocks
    rows = []
    for label, policy in shown:
        if policy != "none" and not blocks:
            continue
        found = best_of_policy(chains, policy, request, budget)
        n = which_nth(found.recipe.segments, blocks)
        if policy == SOLVED and not (found.fits and n):
            continue
        named = label.replace("n-th", ordinal(n or 0))
        rows.append(Alternative(label=named, estimate=found, fits=bool(found.fits)))
    return tuple(rows)


def _other_objectives(
    chains: Chains, request: Request, budget: Budget, practices: Sequence[Alternative]
) -> list[Alternative]:
    """Return what is best for the other objectives.

    What is compared with comes first: it costs little, and what the solver proposes is
    only traced where it can be better.
    """
    rows = []
    for label, objective in OBJECTIVES:
        given = objective == "batch_size" and request.batch_size is not None
        if objective == request.objective or given:
            continue
        asked = replace(request, objective=objective)
        tried = []
        if request.checkpointing == "auto" and chains.traces.subject.blocks:
            full = best_of_policy(chains, "full", asked, budget)
            judged_before = [full, *(row.estimate for row in practices)]
            tried = [each for each in judged_before if each.fits]
        solved = search(
            chains, asked, budget, most_rounds=OBJECTIVE_ROUNDS, known=tried
        ).estimate
        found = best([*tried, *([solved] if solved is not None else [])], asked)
        if found is not None:
            rows.append(Alternative(label=label, estimate=found, fits=True))
    return rows
