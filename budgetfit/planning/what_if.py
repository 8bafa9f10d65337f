"""The usual practices beside the plan, and what would help when nothing fits."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.core.errors import DoesNotFitError, InputError, Suggestion, TraceError
from budgetfit.core.plan import Alternative
from budgetfit.core.precision import PRECISIONS
from budgetfit.planning.chains import Chains
from budgetfit.planning.every_nth import SOLVED, ordinal, which_nth
from budgetfit.planning.levers import lever_rows
from budgetfit.planning.practices import EVERY_NTH, PRACTICES, best, best_of_policy
from budgetfit.planning.search import Request, judged, policy_segments, search
from budgetfit.solvers.chain_dp import lowest_peak
from budgetfit.solvers.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.planning.chains import Setting
    from budgetfit.solvers.batch_size import Objective

OBJECTIVES: tuple[tuple[str, Objective], ...] = (
    ("fastest", "throughput"),
    ("largest batch", "batch_size"),
    ("lowest memory", "memory"),
)
OBJECTIVE_ROUNDS = 2  # recipes that are judged for each other objective
# Levers that change training: only suggested, with what each would need.
OPTIMIZERS = ("adamw_bnb_8bit", "adafactor", "sgd")


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
        *_other_objectives(chains, request, budget, [*first, *rest]),
        *lever_rows(chains, request, budget, plan),
    )


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


def smallest(chains: Chains, request: Request, budget: Budget) -> Estimate:
    """Return the lowest judged peak at the request's batch size, or at batch 1.

    Where checkpointing is free: of the formula's lowest peak and the usual practices,
    because the allocator may reserve less for one of them.
    """
    size = request.batch_size or 1
    policy = request.checkpointing
    if policy == "auto":
        problem = Problem(chain=chains.at(size), budget_bytes=sys.maxsize)
        tried = [
            lowest_peak(problem).segments or (),
            *(policy_segments(chains, name, size) for _, name in PRACTICES),
        ]
    else:
        tried = [policy_segments(chains, policy, size)]
    estimates = [
        judged(chains, chains.setting.recipe(size, segments), budget)
        for segments in dict.fromkeys(tried)
    ]
    return min(estimates, key=lambda estimate: estimate.reserved_bytes)


def does_not_fit(
    chains: Chains, request: Request, least: Estimate, budget: Budget
) -> DoesNotFitError:
    """Return the error: what is needed, what is largest and what would help."""
    return DoesNotFitError(
        needed_bytes=least.reserved_bytes,
        usable_bytes=budget.usable_bytes,
        largest=max(least.at_peak_bytes.items(), key=lambda item: item[1]),
        suggestions=tuple(_suggestions(chains, request, least, budget)),
    )


def _suggestions(
    chains: Chains, request: Request, least: Estimate, budget: Budget
) -> list[Suggestion]:
    """Try what was not allowed, and keep what would fit; one trace each."""
    found = []
    batch_size, segments = least.recipe.batch_size, least.recipe.segments
    if request.checkpointing != "auto":
        free = smallest(chains, replace(request, checkpointing="auto"), budget)
        if free.fits:
            text = 'checkpointing="auto"'
            found.append(Suggestion(text, free.recipe, free.reserved_bytes))
    for text, setting, size in _candidates(chains, batch_size):
        recipe = setting.recipe(size, segments)
        try:
            estimate = judged(Chains(chains.traces, setting), recipe, budget)
        except (InputError, TraceError):
            continue  # the model cannot run that way, so it is no advice
        if estimate.fits:
            found.append(Suggestion(text, recipe, estimate.reserved_bytes))
    return found


def _candidates(chains: Chains, batch_size: int) -> list[tuple[str, Setting, int]]:
    setting = chains.setting
    rows: list[tuple[str, Setting, int]] = []
    if batch_size > 1:
        rows.append(("batch_size=1", replace(setting, accumulation=None), 1))
    precisions = []
    if (
        chains.traces.subject.gpu.compute_capability
        >= PRECISIONS["bf16"].needs_capability
    ):
        precisions.append("bf16")
    rows += [
        (f'optimizer="{name}"', replace(setting, optimizer=name), batch_size)
        for name in OPTIMIZERS
        if name != setting.optimizer
    ]
    for name in precisions:
        if name != setting.precision:
            rows.append(
                (f'precision="{name}"', replace(setting, precision=name), batch_size)
            )
            rows += [
                (
                    f'precision="{name}", optimizer="{optimizer}"',
                    replace(setting, precision=name, optimizer=optimizer),
                    batch_size,
                )
                for optimizer in OPTIMIZERS[:1]
            ]
    return rows
