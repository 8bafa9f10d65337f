"""The planning pipeline: trace, profile, search, judge and report.

``make_plan`` plans in every precision and returns the best plan. ``make_estimate`` and
``make_layers`` only trace and report.
"""

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

import torch

from budgetfit.calibration.known_measurements import times_source
from budgetfit.core.budget import Budget
from budgetfit.core.loop import RUN, Loop
from budgetfit.core.plan import Alternative, Estimate, Layer, LazyAlternatives, Plan
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.planning.alternatives.alternatives import lazy_alternatives
from budgetfit.planning.alternatives.best_settings import best_settings
from budgetfit.planning.alternatives.refusal import (
    MoreChanges,
    Refusal,
    does_not_fit_error,
)
from budgetfit.planning.judge import judge
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.planning.profiling.first_trace import check_estimate_scales
from budgetfit.planning.reports.block_report import block_table
from budgetfit.planning.reports.layer_table import layer_table
from budgetfit.planning.reports.recipe_warnings import (
    accumulation_warnings,
    rounding_warnings,
)
from budgetfit.planning.search.accumulation import accumulation_row
from budgetfit.planning.search.compiled_model import search_compiled_model
from budgetfit.planning.search.curves import lazy_curves
from budgetfit.planning.search.evaluation_batch import evaluation_batch_size
from budgetfit.planning.search.evaluations_between import TURNS, with_evaluations
from budgetfit.planning.search.policies import policy_segments
from budgetfit.planning.search.solver_choice import optimality_text
from budgetfit.planning.search.traced_sessions import traced_sessions
from budgetfit.planning.search.varying_lengths import (
    JudgedLengths,
    estimate_all_lengths,
    session_for_lengths,
    with_lengths,
)
from budgetfit.planning.session import (
    PlanningSession,
    Request,
    SessionSettings,
    budget_of_rank,
)
from budgetfit.traces.session import TraceSession
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.garbage_collection import freeze_gc
from budgetfit.workload.workload import Workload


@freeze_gc()
def make_plan(
    workload: Workload,
    request: Request,
    *,
    more_changes: MoreChanges | None = None,
    **settings: Unpack[SessionSettings],
) -> Plan:
    """Return the best judged plan over all precisions.

    Without an effective batch size the plan takes one micro-batch per optimizer step;
    a note says whether more fit. ``more_changes`` are what else to
    suggest where nothing fits.

    Raises:
        DoesNotFitError: If not even batch 1 with everything recomputed fits.
        TraceError: If the model cannot be traced.
    """
    if settings.get("compile") == "model":
        return _plan_compiled_model(workload, request, **settings)
    started = time.perf_counter()
    sessions = traced_sessions(workload, request, **settings)
    found = best_settings(sessions)
    if isinstance(found, Refusal):
        raise does_not_fit_error(found, more_changes)
    session, judged = found.session, found.judged
    warnings = (*found.warnings, *judged.warnings)
    judged = replace(judged, warnings=warnings)
    plan = _report(session, judged, found.rows, found.slower)
    provenance = {
        **plan.provenance,
        "solver": found.explanation,
        "certificate": optimality_text(session, judged.estimate)
        if session.request.checkpointing == "auto"
        else "",
        "rounds": list(found.rounds),
        "traces": session.traces.log,
        "seconds": round(time.perf_counter() - started, 2),
    }
    return plan.changed(provenance=provenance)


def _plan_compiled_model(
    workload: Workload,
    request: Request,
    **settings: Unpack[SessionSettings],
) -> Plan:
    """Return the best plan with the model compiled as a whole.

    Which blocks can be recomputed is found out without compiling.

    Raises:
        DoesNotFitError: If none of what is tried fits.
        TraceError: If the model cannot be traced.
    """
    started = time.perf_counter()
    plain: SessionSettings = {**settings, "compile": "none"}
    sessions = traced_sessions(workload, request, **plain)
    found = [search_compiled_model(each.changed(compile="model")) for each in sessions]
    best = min(
        found, key=lambda row: (not row.judged.fits, row.session.rank(row.judged))
    )
    session, judged = best.session, best.judged
    if not judged.fits:
        eager = session.changed(compile="none")  # whose blocks are measured
        refused = Refusal(eager, judged, judged.timeline.floor_bytes)
        raise does_not_fit_error(refused, None)
    rows, notes = accumulation_row(session, judged)
    plan = _described(session, judged, rows, notes)
    provenance = {
        **plan.provenance,
        "solver": best.explanation,
        "traces": session.traces.log,
        "seconds": round(time.perf_counter() - started, 2),
    }
    return plan.changed(provenance=provenance)


def _report(
    session: PlanningSession,
    judged: JudgedLengths,
    baselines: tuple[Alternative, ...],
    slower: tuple[PlanningSession, ...],
) -> Plan:
    """Return the plan of a judged recipe: its tables, warnings and sources."""
    estimate = best = judged.estimate
    rows, notes = accumulation_row(session, best)
    if judged.lengths is not None:
        estimate = with_lengths(estimate, judged.lengths)
    plan = _described(session, estimate, rows, (*notes, *judged.warnings))
    recipe, estimate = estimate.recipe, plan.estimate
    block_chain = session.block_chain
    if not recipe.segments:  # other options may not have been traced
        block_chain = block_chain.without_options
    chain, first = block_chain.profile_at(recipe.batch_size), (*rows, *baselines)
    return plan.changed(
        budget=session_for_lengths(session, judged.lengths).budget,
        block_table=block_table(chain, best),
        lazy_alternatives=lazy_alternatives(session, best, first, slower),
        lazy_curves=lazy_curves(session, estimate),
        varying_lengths=judged.lengths,
    )


def _described(
    session: PlanningSession,
    estimate: Estimate,
    rows: tuple[Alternative, ...],
    notes: tuple[str, ...],
) -> Plan:
    """Return a plan of a judged recipe, with the alternatives ``rows`` alone."""
    workload, traces, recipe = session.workload, session.traces, estimate.recipe
    eval_batch_size = evaluation_batch_size(traces, recipe, session.budget)
    estimate = replace(estimate, eval_batch_size=eval_batch_size)
    return Plan(
        recipe=recipe,
        estimate=estimate,
        budget=session.budget,
        gpu=workload.gpu,
        model=workload.summary(),
        lazy_alternatives=LazyAlternatives(known=rows, evaluate=lambda: rows),
        warnings=(
            *workload.notes,
            *session.notes,
            *notes,
            *rounding_warnings(workload.model, recipe),
            *_host_warnings(session, estimate),
            *accumulation_warnings(traces, recipe),
            *_compile_warnings(estimate),
            *traces.cache_notes,
        ),
        provenance=_provenance(session, estimate),
    )


def _provenance(session: PlanningSession, estimate: Estimate) -> dict[str, object]:
    """Return the sources of a plan's numbers that do not depend on the search."""
    source = session.budget.context
    context = f", {source.source}" if source is not None else ""
    gpu = session.workload.gpu
    return {
        **library_versions(),
        "allocated, reserved": "replay of the traced step through PyTorch's "
        "caching allocator",
        "process": f"reserved + the CUDA context{context}",
        "times": times_source(gpu, estimate.recipe.precision),
        "card": gpu.source,
        "notes": list(session.workload.notes),
    }


def _host_warnings(session: PlanningSession, estimate: Estimate) -> tuple[str, ...]:
    """Return a warning about the host memory that offloading needs."""
    if not estimate.host_bytes:
        return ()
    budget, limit = session.budget, ""
    if budget.host_ram_bytes is not None:
        limit = f" of {format_bytes(budget.host_ram_bytes)} {budget.host_ram_source}"
    ranks = " for each of its ranks" if estimate.recipe.ranks > 1 else ""
    return (
        (
            f"{format_bytes(estimate.host_bytes)}{limit} wait in "
            f"{estimate.host_memory}: the machine needs as much RAM free{ranks}, and "
            "times depend on its bus"
        ),
    )


def _compile_warnings(estimate: Estimate) -> tuple[str, ...]:
    """Warn about what a plan with compiled blocks does not show."""
    if estimate.recipe.compile == "none":
        return ()
    return (
        (
            "torch.compile: the first run.step() compiles, which takes a minute or so; "
            "batches of other sizes compile again, with another peak: pad all alike"
        ),
        (
            "torch.compile: times count what fused kernels read and write, and were "
            "compared with few measurements; verify() on the card measures yours"
        ),
    )


def make_estimate(  # noqa: PLR0913 - one value each, all needed
    workload: Workload,
    recipe: Recipe,
    budget: Budget,
    *,
    context_bytes: int,
    keep_own_checkpointing: bool = False,
    progress: Callable[[str], None] | None = None,
    loop: Loop = RUN,
) -> Estimate:
    """Return the predicted memory and time of one given recipe in a training loop.

    Raises:
        InputError: If no tensor is found to grow with the batch size.
        TraceError: If the model cannot be traced.
    """
    traces = TraceSession(workload, progress)
    if recipe.parallelism is not None:
        budget = budget_of_rank(budget, recipe.parallelism)
    trace = traces.exact(
        recipe, keep_own_checkpointing=keep_own_checkpointing, loop=loop
    )
    check_estimate_scales(
        traces, trace, recipe, keep_own_checkpointing=keep_own_checkpointing, loop=loop
    )
    made = judge(
        trace,
        recipe,
        workload.gpu,
        budget,
        context_bytes=context_bytes,
        notes=(*workload.notes, *traces.cache_notes),
        replayed=with_evaluations(traces, trace, recipe, loop),
        most_retries=TURNS if loop.evaluation_batch_size else 0,
    )
    notes = (*made.notes, *_too_much_host_memory(made, budget))
    return estimate_all_lengths(
        traces,
        budget,
        replace(made, loop=loop, notes=notes),
        keep_own_checkpointing=keep_own_checkpointing,
        loop=loop,
    )


def _too_much_host_memory(made: Estimate, budget: Budget) -> list[str]:
    """Return a note where the limit on host memory does not hold it."""
    used, limit = made.host_bytes, budget.host_ram_bytes
    if limit is None or used <= limit:
        return []
    each = " on each GPU" if made.recipe.parallelism is not None else ""
    text = (
        f"does not fit in host memory: {format_bytes(used)} are needed{each}, of "
        f"{format_bytes(limit)} {budget.host_ram_source}. Say what the machine has "
        "with host_ram=, or plan again"
    )
    return [text]


def policy_recipe(
    workload: Workload,
    policy: str | tuple[str, ...],
    settings: TrainingSettings,
    batch_size: int,
) -> Recipe:
    """Return the recipe of a fixed checkpointing policy; refuse ``auto`` and others."""
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
