"""Compare GPUs: the best settings on each of several cards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.core.plan import GpuComparison
from budgetfit.core.precision import requested_precisions
from budgetfit.errors import InputError
from budgetfit.planning.profiling.first_trace import fallback_for
from budgetfit.planning.search.accumulation import (
    planned_accumulation,
    recommend_one_micro_batch,
)
from budgetfit.planning.search.baselines import best_with_policy
from budgetfit.planning.search.loss_chunking import search_with_loss_chunks
from budgetfit.planning.search.lowest_peak import lowest_judged
from budgetfit.planning.session import open_sessions
from budgetfit.traces.gc_freeze import freeze_gc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.gpus.table import Gpu
    from budgetfit.planning.session import PlanningSession, Request
    from budgetfit.workload.workload import Workload


@freeze_gc()
def compare_gpus(  # noqa: PLR0913 - one value each, all needed
    workload: Workload,
    cards: Sequence[tuple[Gpu, Budget]],
    request: Request,
    *,
    precision: str | Sequence[str],
    optimizer: str,
    effective_batch_size: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[GpuComparison, ...]:
    """Return the best judged settings on each card, in the order of ``cards``.

    Cards of one compute capability run the same programs and share their traces.

    Raises:
        TraceError: If the model cannot be traced.
    """
    opened: list[list[PlanningSession]] = []
    rows = []
    for gpu, budget in cards:
        if progress is not None:
            progress(f"planning for {gpu.title}")
        try:
            precisions = requested_precisions(precision, gpu)
        except InputError as error:
            row = GpuComparison(
                gpu=gpu, budget=budget, estimate=None, problem=str(error)
            )
            rows.append(row)
            continue
        there = replace(workload, gpu=gpu)
        sessions = _on_gpu(opened, there, budget)
        if not sessions:
            sessions = open_sessions(
                there,
                budget,
                request,
                accumulation=planned_accumulation(
                    effective_batch_size, optimizer_in_backward=False
                ),
                precisions=precisions,
                optimizer=optimizer,
                effective_batch_size=effective_batch_size,
                fallback_precision=fallback_for(precision),
                progress=progress,
            )
            opened.append(sessions)
        rows.append(_row(sessions, len(workload.notes)))
    return tuple(rows)


def _on_gpu(
    opened: Sequence[Sequence[PlanningSession]], workload: Workload, budget: Budget
) -> list[PlanningSession]:
    """Return the sessions of a card of equal compute capability, on this card."""
    for sessions in opened:
        target = replace(sessions[0].workload, gpu=workload.gpu).target
        if sessions[0].workload.target == target:
            return [each.on_gpu(workload.gpu, budget) for each in sessions]
    return []


def _row(sessions: Sequence[PlanningSession], known_notes: int) -> GpuComparison:
    """Return the row of a card; the first notes of the workload are known."""
    estimate = _best_on_gpu(sessions)
    traces = sessions[0].traces
    return GpuComparison(
        gpu=traces.workload.gpu,
        budget=sessions[0].budget,
        estimate=estimate,
        blocks=len(traces.workload.blocks),
        warnings=(*traces.workload.notes[known_notes:], *traces.cache_notes),
    )


def _best_on_gpu(sessions: Sequence[PlanningSession]) -> Estimate:
    """Return the best of the search and the baselines, or the lowest peak."""
    rated = [_best_or_lowest(each) for each in sessions]
    found = sessions[0].best_fitting(each for _, each in rated)
    if found is not None:
        session = next(session for session, each in rated if each is found)
        return recommend_one_micro_batch(session, found)[0]
    least = min((each for _, each in rated), key=lambda each: each.reserved_bytes)
    accumulates = sessions[0].settings.accumulation is not None
    if accumulates and least.timeline.floor_bytes <= sessions[0].budget.usable_bytes:
        return _best_on_gpu([each.changed(accumulation=None) for each in sessions])
    return least


def _best_or_lowest(session: PlanningSession) -> tuple[PlanningSession, Estimate]:
    """Return the best in one precision, with its session."""
    found = search_with_loss_chunks(session)
    tried = [] if found.estimate is None else [found.estimate]
    if session.request.checkpointing == "auto":
        policies = ("none", "full") if session.workload.blocks else ("none",)
        tried += [best_with_policy(session, name) for name in policies]
    best = session.best_fitting(tried) or lowest_judged(session)
    return found.session, best
