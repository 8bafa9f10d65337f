"""A plan from start to end: every precision searched, the best one kept."""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from budgetfit.calibration.known_measurements import times_source
from budgetfit.core.plan import Alternative, Estimate, Layer, Plan
from budgetfit.errors import InputError, TraceError
from budgetfit.memory.chain.peak import optimizer_step_bytes
from budgetfit.planning.alternatives.alternatives import decisive_rows
from budgetfit.planning.alternatives.lazy_alternatives import later_rows
from budgetfit.planning.alternatives.refusal import does_not_fit
from budgetfit.planning.judging.judge import judge
from budgetfit.planning.judging.partial_last_batch import last_batch_warnings
from budgetfit.planning.profiling.block_chain import Chains, Setting
from budgetfit.planning.profiling.first_trace import (
    chains_of_each,
    check_estimate_grows,
)
from budgetfit.planning.reports.block_report import block_table
from budgetfit.planning.reports.layer_table import layer_table
from budgetfit.planning.search.accumulation import (
    accumulation_to_plan_for,
    one_micro_batch,
    without_accumulation,
)
from budgetfit.planning.search.evaluation_batch import evaluation_batch_size
from budgetfit.planning.search.loss_chunking import search_with_loss_parts
from budgetfit.planning.search.lowest_peak import smallest
from budgetfit.planning.search.optimality_gap import certificate
from budgetfit.planning.search.search import Found, Request, policy_segments, rank
from budgetfit.traces.gc_freeze import old_objects_left_alone
from budgetfit.traces.session import Traces
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.recipe import Recipe
    from budgetfit.workload.workload import Subject


@old_objects_left_alone()
def make_plan(  # noqa: PLR0913 - one value each, all needed
    subject: Subject,
    budget: Budget,
    request: Request,
    *,
    precisions: Sequence[str],
    optimizer: str,
    effective_batch_size: int | None = None,
    optimizer_in_backward: bool = False,
    instead: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Return the best judged plan over all ``precisions``.

    Without an effective batch size the plan takes one micro-batch per optimizer step,
    and is chosen so that any number of them fits. ``instead`` is the precision for
    models that cannot run in the first of them; a warning says so.

    Raises:
        DoesNotFitError: If not even batch 1 with everything recomputed fits.
        TraceError: If the model cannot be traced.
    """
    started = time.perf_counter()
    setting = Setting(
        precision=precisions[0],
        optimizer=optimizer,
        effective_batch_size=effective_batch_size,
        accumulation=accumulation_to_plan_for(
            effective_batch_size, optimizer_in_backward=optimizer_in_backward
        ),
        optimizer_in_backward=optimizer_in_backward,
        host_ram_bytes=budget.host_ram_bytes,
    )
    try:
        candidates = chains_of_each(subject, precisions, setting, instead, progress)
    except TraceError as error:
        if setting.accumulation is None:
            raise
        # Sparse gradients, for one, cannot be traced where they are added up.
        once = replace(setting, accumulation=None)
        try:
            candidates = chains_of_each(subject, precisions, once, instead, progress)
        except TraceError:
            raise error from None
    traces = candidates[0].traces
    subject = traces.subject
    if request.checkpointing == "as-is":
        request = replace(request, checkpointing=subject.own_checkpointing())
    chains, best = _best_of(candidates, request, budget)
    _say(progress, "judging the usual practices")
    first = decisive_rows(chains, request, budget)
    judged_best, explanation = _best_judged(best, first, request)
    estimate, rows, notes = without_accumulation(chains, judged_best, budget)
    recipe = estimate.recipe
    estimate = replace(
        estimate, eval_batch_size=evaluation_batch_size(traces, recipe, budget)
    )
    trace = chains.traces.for_all_sizes(recipe)
    last_batch = last_batch_warnings(trace, recipe, subject.gpu, budget)
    free = request.checkpointing == "auto"
    proven = (
        certificate(chains, judged_best.recipe, budget.usable_bytes) if free else ""
    )
    return Plan(
        recipe=recipe,
        estimate=estimate,
        budget=budget,
        gpu=subject.gpu,
        model=subject.summary(),
        block_table=block_table(chains.at(recipe.batch_size), judged_best, budget),
        later=later_rows(chains, request, budget, judged_best, (*rows, *first)),
        warnings=(
            *subject.notes,
            *notes,
            *last_batch,
            *host_warnings(estimate, budget),
            *traces.cache_notes,
        ),
        provenance={
            **_provenance(subject, estimate, budget),
            "solver": explanation,
            "certificate": proven,
            "rounds": list(best.rounds),
            "traces": traces.log,
            "seconds": round(time.perf_counter() - started, 2),
        },
    )


def _best_of(
    candidates: Sequence[Chains], request: Request, budget: Budget
) -> tuple[Chains, Found]:
    """Return the best of what was found for each, or the least that there is.

    Raises:
        DoesNotFitError: If even that is too much.
    """
    hopeful = [
        chains
        for chains in candidates
        if optimizer_step_bytes(chains.at(request.batch_size or 1))
        <= budget.usable_bytes
    ]
    found = [search_with_loss_parts(chains, request, budget) for chains in hopeful]
    rated = [
        (rank(row.estimate, request.objective), index)
        for index, (_, row) in enumerate(found)
        if row.estimate is not None
    ]
    if rated:
        return found[min(rated)[1]]
    # The search leaves room for what the allocator might reserve; that nothing fits is
    # for the judge to say.
    accumulates = candidates[0].setting.accumulation is not None
    if hopeful or not accumulates:
        tried = [
            (each, smallest(each, request, budget)) for each in hopeful or candidates
        ]
        chains, least = min(
            tried, key=lambda row: (not row[1].fits, row[1].reserved_bytes)
        )
        if least.fits:
            return chains, Found(
                estimate=least, explanation="The lowest that was found"
            )
        if not accumulates:
            floor_bytes = min(row.timeline.floor_bytes for _, row in tried)
            raise does_not_fit(chains, request, least, budget, floor_bytes)
    return _best_of(one_micro_batch(candidates), request, budget)


def _provenance(
    subject: Subject, estimate: Estimate, budget: Budget
) -> dict[str, object]:
    """Return where numbers are from, whatever the search did."""
    context = f", {budget.context.source}" if budget.context is not None else ""
    return {
        **versions(),
        "allocated, reserved": "replay of the traced step through PyTorch's "
        "caching allocator",
        "process": f"reserved + the CUDA context{context}",
        "times": times_source(subject.gpu, estimate.recipe.precision),
        "card": subject.gpu.source,
        "notes": list(subject.notes),
    }


def host_warnings(estimate: Estimate, budget: Budget) -> tuple[str, ...]:
    """Say what offloading asks of the machine."""
    if not estimate.host_bytes:
        return ()
    limit = ""
    if budget.host_ram_bytes is not None:
        limit = f" of {format_bytes(budget.host_ram_bytes)} {budget.host_ram_source}"
    return (
        (
            f"{format_bytes(estimate.host_bytes)}{limit} wait in pinned host memory: "
            "the machine needs as much RAM free, and the time rests on its bus"
        ),
    )


def _best_judged(
    proposed: Found, others: tuple[Alternative, ...], request: Request
) -> tuple[Estimate, str]:
    """Return what the judge rates best where the plan was free to choose.

    The solver's formula knows nothing of what the allocator reserves, and it compares
    some batch sizes only; a usual practice may come out ahead of its proposal, and no
    plan may be worse than that.
    """
    estimate, explanation = proposed.estimate, proposed.explanation
    assert estimate is not None  # noqa: S101 - only what was found is proposed
    ahead = [
        row
        for row in others
        if row.fits
        and rank(row.estimate, request.objective) < rank(estimate, request.objective)
    ]
    if request.checkpointing != "auto" or not ahead:
        return estimate, explanation
    best = min(ahead, key=lambda row: rank(row.estimate, request.objective))
    explanation = (
        f"{best.label!r} came out ahead of the solver's own proposal once both were "
        f"judged; that one was: {explanation}"
    )
    return best.estimate, explanation


def make_estimate(  # noqa: PLR0913 - one value each, all needed
    subject: Subject,
    recipe: Recipe,
    budget: Budget | None,
    *,
    context_bytes: int,
    keep_own_checkpointing: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Estimate:
    """Return the memory and time of one given recipe; nothing is decided.

    Raises:
        InputError: If nothing in it grows with the batch, as far as that can be told.
        TraceError: If the model cannot be traced.
    """
    traces = Traces(subject, progress)
    trace = traces.once(recipe, keep_own_checkpointing=keep_own_checkpointing)
    check_estimate_grows(
        traces, trace, recipe, keep_own_checkpointing=keep_own_checkpointing
    )
    return judge(
        trace,
        recipe,
        subject.gpu,
        budget,
        context_bytes=context_bytes,
        notes=(*subject.notes, *traces.cache_notes),
    )


def policy_recipe(
    subject: Subject,
    policy: str | tuple[str, ...],
    setting: Setting,
    batch_size: int,
) -> Recipe:
    """Return the recipe of a checkpointing policy, with nothing left to solve.

    Raises:
        InputError: For ``auto``, which is a question for ``plan``, or no policy.
    """
    if policy == "auto":
        raise InputError(
            "checkpointing='auto' is a decision, and an estimate takes none. Use plan, "
            "or one of: as-is, none, full, every-2, sqrt, or block names."
        )
    if policy == "as-is":
        policy = subject.own_checkpointing()
    chains = Chains(Traces(subject), setting)
    return setting.recipe(batch_size, policy_segments(chains, policy, batch_size))


def make_layers(
    subject: Subject,
    precisions: Sequence[str],
    progress: Callable[[str], None] | None = None,
) -> tuple[Layer, ...]:
    """Return the layer table, from one kept trace under each precision."""
    traces = Traces(subject, progress)
    recipes = {
        name: Setting(precision=name, optimizer="sgd").recipe(2) for name in precisions
    }
    return layer_table(
        subject.model,
        subject.blocks,
        {name: traces.of(recipe) for name, recipe in recipes.items()},
    )


def versions() -> dict[str, str]:
    """Return what ran: the versions that a plan's numbers belong to."""
    result = {"torch": str(torch.__version__)}
    for name in ("transformers", "budgetfit"):
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            result[name] = "not installed"
    return result


def _say(progress: Callable[[str], None] | None, text: str) -> None:
    if progress is not None:
        progress(text)
