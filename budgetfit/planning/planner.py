"""The planning pipeline: search every precision and return the best plan."""

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
from budgetfit.planning.alternatives.alternatives import deciding_baselines
from budgetfit.planning.alternatives.lazy_alternatives import lazy_alternatives
from budgetfit.planning.alternatives.refusal import does_not_fit_error
from budgetfit.planning.judging.judge import judge
from budgetfit.planning.judging.partial_last_batch import last_batch_warnings
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.planning.profiling.first_trace import (
    block_chain_per_precision,
    check_estimate_scales,
)
from budgetfit.planning.reports.block_report import block_table
from budgetfit.planning.reports.layer_table import layer_table
from budgetfit.planning.search.accumulation import (
    planned_accumulation,
    recommend_one_micro_batch,
    without_accumulation,
)
from budgetfit.planning.search.evaluation_batch import evaluation_batch_size
from budgetfit.planning.search.loss_chunking import search_with_loss_chunks
from budgetfit.planning.search.lowest_peak import lowest_judged
from budgetfit.planning.search.optimality_gap import optimality_text
from budgetfit.planning.search.search import (
    Request,
    SearchResult,
    policy_segments,
    rank,
)
from budgetfit.traces.gc_freeze import freeze_gc
from budgetfit.traces.session import TraceSession
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.recipe import Recipe
    from budgetfit.workload.workload import Workload


@freeze_gc()
def make_plan(  # noqa: PLR0913 - one value each, all needed
    workload: Workload,
    budget: Budget,
    request: Request,
    *,
    precisions: Sequence[str],
    optimizer: str,
    effective_batch_size: int | None = None,
    optimizer_in_backward: bool = False,
    fallback_precision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Return the best judged plan over all ``precisions``.

    Without an effective batch size the plan takes one micro-batch per optimizer step,
    and is chosen so that any number of them fits. ``fallback_precision``
    is for models that cannot run in the first of ``precisions``; a warning says so.

    Raises:
        DoesNotFitError: If not even batch 1 with everything recomputed fits.
        TraceError: If the model cannot be traced.
    """
    started = time.perf_counter()
    settings = TrainingSettings(
        precision=precisions[0],
        optimizer=optimizer,
        effective_batch_size=effective_batch_size,
        accumulation=planned_accumulation(
            effective_batch_size, optimizer_in_backward=optimizer_in_backward
        ),
        optimizer_in_backward=optimizer_in_backward,
        host_ram_bytes=budget.host_ram_bytes,
    )
    try:
        candidates = block_chain_per_precision(
            workload, precisions, settings, fallback_precision, progress
        )
    except TraceError as error:
        if settings.accumulation is None:
            raise
        # For example, accumulation of sparse gradients cannot be traced.
        once = replace(settings, accumulation=None)
        try:
            candidates = block_chain_per_precision(
                workload, precisions, once, fallback_precision, progress
            )
        except TraceError:
            raise error from None
    traces = candidates[0].traces
    workload = traces.workload
    if request.checkpointing == "as-is":
        request = replace(request, checkpointing=workload.own_checkpointing())
    block_chain, best = _best_of(candidates, request, budget)
    _say(progress, "judging the usual practices")
    first = deciding_baselines(block_chain, request, budget)
    judged_best, explanation = _best_judged(best, first, request)
    estimate, rows, notes = recommend_one_micro_batch(block_chain, judged_best, budget)
    recipe = estimate.recipe
    estimate = replace(
        estimate, eval_batch_size=evaluation_batch_size(traces, recipe, budget)
    )
    trace = block_chain.traces.cached_affine(recipe)
    last_batch = last_batch_warnings(trace, recipe, workload.gpu, budget)
    free = request.checkpointing == "auto"
    proven = (
        optimality_text(block_chain, judged_best.recipe, budget.usable_bytes)
        if free
        else ""
    )
    return Plan(
        recipe=recipe,
        estimate=estimate,
        budget=budget,
        gpu=workload.gpu,
        model=workload.summary(),
        block_table=block_table(
            block_chain.profile_at(recipe.batch_size), judged_best, budget
        ),
        lazy_alternatives=lazy_alternatives(
            block_chain, request, budget, judged_best, (*rows, *first)
        ),
        warnings=(
            *workload.notes,
            *notes,
            *last_batch,
            *host_warnings(estimate, budget),
            *traces.cache_notes,
        ),
        provenance={
            **_provenance(workload, estimate, budget),
            "solver": explanation,
            "certificate": proven,
            "rounds": list(best.rounds),
            "traces": traces.log,
            "seconds": round(time.perf_counter() - started, 2),
        },
    )


def _best_of(
    candidates: Sequence[BlockChain], request: Request, budget: Budget
) -> tuple[BlockChain, SearchResult]:
    """Return the best search result over all precisions, or the lowest peak.

    Raises:
        DoesNotFitError: If even the lowest peak does not fit.
    """
    hopeful = [
        block_chain
        for block_chain in candidates
        if optimizer_step_bytes(block_chain.profile_at(request.batch_size or 1))
        <= budget.usable_bytes
    ]
    found = [
        search_with_loss_chunks(block_chain, request, budget) for block_chain in hopeful
    ]
    rated = [
        (rank(row.estimate, request.objective), index)
        for index, (_, row) in enumerate(found)
        if row.estimate is not None
    ]
    if rated:
        return found[min(rated)[1]]
    # The search leaves room for what the allocator might reserve; only the judge can
    # say that nothing fits.
    accumulates = candidates[0].settings.accumulation is not None
    if hopeful or not accumulates:
        tried = [
            (each, lowest_judged(each, request, budget))
            for each in hopeful or candidates
        ]
        block_chain, least = min(
            tried, key=lambda row: (not row[1].fits, row[1].reserved_bytes)
        )
        if least.fits:
            return block_chain, SearchResult(
                estimate=least, explanation="The lowest that was found"
            )
        if not accumulates:
            floor_bytes = min(row.timeline.floor_bytes for _, row in tried)
            raise does_not_fit_error(block_chain, request, least, budget, floor_bytes)
    return _best_of(without_accumulation(candidates), request, budget)


def _provenance(
    workload: Workload, estimate: Estimate, budget: Budget
) -> dict[str, object]:
    """Return the sources of a plan's numbers that do not depend on the search."""
    context = f", {budget.context.source}" if budget.context is not None else ""
    return {
        **library_versions(),
        "allocated, reserved": "replay of the traced step through PyTorch's "
        "caching allocator",
        "process": f"reserved + the CUDA context{context}",
        "times": times_source(workload.gpu, estimate.recipe.precision),
        "card": workload.gpu.source,
        "notes": list(workload.notes),
    }


def host_warnings(estimate: Estimate, budget: Budget) -> tuple[str, ...]:
    """Return a warning about the pinned host memory that offloading needs."""
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
    proposed: SearchResult, others: tuple[Alternative, ...], request: Request
) -> tuple[Estimate, str]:
    """Return the better of the search result and the baselines, as judged.

    The solver's formula ignores what the allocator reserves and compares only some
    batch sizes, so that a baseline may beat its proposal; no plan may be worse than a
    baseline.
    """
    estimate, explanation = proposed.estimate, proposed.explanation
    assert estimate is not None  # noqa: S101 - _best_of returns nothing else
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
    workload: Workload,
    recipe: Recipe,
    budget: Budget | None,
    *,
    context_bytes: int,
    keep_own_checkpointing: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Estimate:
    """Return the predicted memory and time of one given recipe.

    Raises:
        InputError: If no tensor is found to grow with the batch size.
        TraceError: If the model cannot be traced.
    """
    traces = TraceSession(workload, progress)
    trace = traces.exact(recipe, keep_own_checkpointing=keep_own_checkpointing)
    check_estimate_scales(
        traces, trace, recipe, keep_own_checkpointing=keep_own_checkpointing
    )
    return judge(
        trace,
        recipe,
        workload.gpu,
        budget,
        context_bytes=context_bytes,
        notes=(*workload.notes, *traces.cache_notes),
    )


def policy_recipe(
    workload: Workload,
    policy: str | tuple[str, ...],
    settings: TrainingSettings,
    batch_size: int,
) -> Recipe:
    """Return the recipe of a fixed checkpointing policy.

    Raises:
        InputError: For ``auto``, which needs ``plan``, or an unknown policy.
    """
    if policy == "auto":
        raise InputError(
            "checkpointing='auto' is a decision, and an estimate takes none. Use plan, "
            "or one of: as-is, none, full, every-2, sqrt, or block names."
        )
    if policy == "as-is":
        policy = workload.own_checkpointing()
    block_chain = BlockChain(TraceSession(workload), settings)
    return settings.recipe(batch_size, policy_segments(block_chain, policy, batch_size))


def make_layers(
    workload: Workload,
    precisions: Sequence[str],
    progress: Callable[[str], None] | None = None,
) -> tuple[Layer, ...]:
    """Return the layer table, from one trace without recomputation per precision."""
    traces = TraceSession(workload, progress)
    recipes = {
        name: TrainingSettings(precision=name, optimizer="sgd").recipe(2)
        for name in precisions
    }
    return layer_table(
        workload.model,
        workload.blocks,
        {name: traces.affine(recipe) for name, recipe in recipes.items()},
    )


def library_versions() -> dict[str, str]:
    """Return the library versions that a plan's numbers belong to."""
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
