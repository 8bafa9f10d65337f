"""Alternatives to a plan: baselines, other objectives and changes of training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.core.plan import Alternative
from budgetfit.planning.alternatives.training_changes import training_change_rows
from budgetfit.planning.profiling.block_chain import BlockChain
from budgetfit.planning.search.baselines import (
    BASELINES,
    EVERY_NTH,
    best_fitting,
    best_with_policy,
)
from budgetfit.planning.search.every_nth_block import (
    EVERY_N_POLICY,
    every_n_of_segments,
    ordinal,
)
from budgetfit.planning.search.loss_chunking import (
    search_with_loss_chunks,
)
from budgetfit.planning.search.lowest_peak import lowest_judged
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


def deciding_baselines(
    block_chain: BlockChain, request: Request, budget: Budget
) -> tuple[Alternative, ...]:
    """Return the baselines that may be better than the solver's proposal.

    Each is at its own best batch size, judged like the plan. Chen's segments never
    recompute less than the solver's, so they can only win in memory.
    """
    shown = BASELINES if request.objective != "throughput" else BASELINES[:-1]
    return _baselines(block_chain, request, budget, shown)


def remaining_alternatives(
    block_chain: BlockChain,
    request: Request,
    budget: Budget,
    plan: Estimate,
    first: tuple[Alternative, ...],
) -> tuple[Alternative, ...]:
    """Return the alternatives that cannot become the plan, after the rows ``first``."""
    shown = [row.label for row in first]
    # Where nothing has to be recomputed, every n-th block need not be either.
    usual = (*BASELINES, EVERY_NTH) if plan.recipe.segments else BASELINES
    others = tuple(pair for pair in usual if pair[0] not in shown)
    rest = _baselines(block_chain, request, budget, others)
    return (
        *rest,
        *_without_host(block_chain, request, budget, plan),
        *_other_objectives(block_chain, request, budget, [*first, *rest]),
        *training_change_rows(block_chain, request, budget, plan),
    )


def _without_host(
    block_chain: BlockChain, request: Request, budget: Budget, plan: Estimate
) -> tuple[Alternative, ...]:
    """Return the best plan without offload to host memory, where the plan offloads."""
    if not plan.host_bytes:
        return ()
    settings = replace(block_chain.settings, loss_chunks=1, host_ram_bytes=0)
    on_device = BlockChain(block_chain.traces, settings)
    found_on, found = search_with_loss_chunks(on_device, request, budget)
    estimate = found.estimate or lowest_judged(found_on, request, budget)
    label = "without host memory"
    return (Alternative(label=label, estimate=estimate, fits=bool(estimate.fits)),)


def _baselines(
    block_chain: BlockChain,
    request: Request,
    budget: Budget,
    shown: tuple[tuple[str, str], ...],
) -> tuple[Alternative, ...]:
    blocks = block_chain.traces.workload.blocks
    rows = []
    for label, policy in shown:
        if policy != "none" and not blocks:
            continue
        found = best_with_policy(block_chain, policy, request, budget)
        n = every_n_of_segments(found.recipe.segments, blocks)
        if policy == EVERY_N_POLICY and not (found.fits and n):
            continue
        named = label.replace("n-th", ordinal(n or 0))
        rows.append(Alternative(label=named, estimate=found, fits=bool(found.fits)))
    return tuple(rows)


def _other_objectives(
    block_chain: BlockChain,
    request: Request,
    budget: Budget,
    baselines: Sequence[Alternative],
) -> list[Alternative]:
    """Return the best recipes for the other objectives.

    Baselines come first: they cost little, and the solver's proposals are only traced
    where they can be better.
    """
    rows = []
    for label, objective in OBJECTIVES:
        given = objective == "batch_size" and request.batch_size is not None
        if objective == request.objective or given:
            continue
        asked = replace(request, objective=objective)
        tried = []
        if request.checkpointing == "auto" and block_chain.traces.workload.blocks:
            full = best_with_policy(block_chain, "full", asked, budget)
            judged_before = [full, *(row.estimate for row in baselines)]
            tried = [each for each in judged_before if each.fits]
        solved = search(
            block_chain, asked, budget, max_rounds=OBJECTIVE_ROUNDS, known=tried
        ).estimate
        found = best_fitting([*tried, *([solved] if solved is not None else [])], asked)
        if found is not None:
            rows.append(Alternative(label=label, estimate=found, fits=True))
    return rows
