"""Compare GPUs: the best settings on each of several cards, or groups of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from budgetfit.core.budget import Budget
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Estimate, GpuComparison
from budgetfit.core.precision import requested_precisions
from budgetfit.core.varying_lengths import VaryingLengths
from budgetfit.errors import InputError
from budgetfit.gpus.table import Gpu
from budgetfit.planning.alternatives.best_settings import best_settings
from budgetfit.planning.alternatives.refusal import Refusal
from budgetfit.planning.profiling.first_trace import fallback_for
from budgetfit.planning.search.traced_sessions import traced_sessions
from budgetfit.planning.search.varying_lengths import (
    session_for_lengths,
    with_lengths,
)
from budgetfit.planning.session import PlanningSession, Request
from budgetfit.traces.depth_extrapolator import DepthChecks
from budgetfit.utils.garbage_collection import freeze_gc
from budgetfit.workload.workload import Workload

_OVER_ALL_SIZES: Final = (
    "rates, times and costs are over all sizes of the samples{}. Use plan for a card "
    "(budgetfit plan MODEL --gpu NAME), which says what to set for them"
)


class Card(NamedTuple):
    """What is compared: a GPU, or several that train together.

    Attributes:
        gpu, budget: The GPU, and its usable memory.
        parallelisms: The ways to use several, to choose from; none: one GPU.
        effective_batch_size: Samples per optimizer step of each GPU.
        problem: Why nothing can be planned; empty otherwise.
    """

    gpu: Gpu
    budget: Budget
    parallelisms: tuple[Parallelism, ...] = ()
    effective_batch_size: int | None = None
    problem: str = ""


@freeze_gc()
def compare_gpus(  # noqa: PLR0913 - one value each, all needed
    workload: Workload,
    cards: Sequence[Card],
    request: Request,
    *,
    precision: str | Sequence[str],
    optimizer: str,
    progress: Callable[[str], None] | None = None,
) -> tuple[GpuComparison, ...]:
    """Return the best judged settings on each card, in the order of ``cards``.

    Cards of one compute capability run the same programs and share their traces.

    Raises:
        TraceError: If the model cannot be traced.
    """
    opened: list[list[PlanningSession]] = []
    depth_checks = DepthChecks()
    rows = []
    for card in cards:
        if progress is not None:
            many = f"{card.parallelisms[0].gpus} x " if card.parallelisms else ""
            progress(f"planning for {many}{card.gpu.title}")
        if problem := card.problem or _lacks(card.gpu, precision):
            row = GpuComparison(
                gpu=card.gpu, budget=card.budget, estimate=None, problem=problem
            )
            rows.append(row)
            continue
        there = replace(workload, gpu=card.gpu)
        sessions = _on_card(opened, there, card)
        if not sessions:
            sessions = traced_sessions(
                there,
                replace(request, budget=card.budget),
                precisions=requested_precisions(precision, card.gpu),
                optimizer=optimizer,
                effective_batch_size=card.effective_batch_size,
                parallelisms=card.parallelisms,
                fallback_precision=fallback_for(precision),
                progress=progress,
                depth_checks=depth_checks,
            )
            opened.append(sessions)
        rows.append(_row(sessions, len(workload.notes)))
    return tuple(rows)


def _lacks(gpu: Gpu, precision: str | Sequence[str]) -> str:
    """Return why a GPU cannot run what is requested; empty where it can."""
    try:
        requested_precisions(precision, gpu)
    except InputError as error:
        return str(error)
    return ""


def _on_card(
    opened: Sequence[Sequence[PlanningSession]], workload: Workload, card: Card
) -> list[PlanningSession]:
    """Return the sessions of as many cards of equal compute capability, on these."""
    ways = _without_offload(card.parallelisms or (None,))
    for sessions in opened:
        target = replace(sessions[0].workload, gpu=workload.gpu).target
        found = _without_offload(each.settings.parallelism for each in sessions)
        if found == ways and sessions[0].workload.target == target:
            return [each.on_gpu(workload.gpu, card.budget) for each in sessions]
    return []


def _without_offload(
    parallelisms: Iterable[Parallelism | None],
) -> set[Parallelism | None]:
    # Not all precisions have sessions of these.
    return {each for each in parallelisms if each is None or not each.cpu_offload}


def _row(sessions: Sequence[PlanningSession], known_notes: int) -> GpuComparison:
    """Return the row of a card; the first notes of the workload are known."""
    session, estimate, warnings = _best_on_gpu(sessions)
    traces = sessions[0].traces
    return GpuComparison(
        gpu=traces.workload.gpu,
        budget=session.budget,
        estimate=estimate,
        blocks=len(traces.workload.blocks),
        warnings=(
            *traces.workload.notes[known_notes:],
            *session.notes,
            *warnings,
            *traces.cache_notes,
        ),
    )


def _best_on_gpu(
    sessions: Sequence[PlanningSession],
) -> tuple[PlanningSession, Estimate, tuple[str, ...]]:
    """Return the settings that a plan would have, or the lowest peak."""
    # With what is reserved over all lengths of the samples, and warnings about these.
    found = best_settings(sessions)
    if isinstance(found, Refusal):
        return found.session, found.least, ()
    session, judged = found.session, found.judged
    if judged.lengths is None:
        return session, judged.estimate, judged.warnings
    estimate = with_lengths(judged.estimate, judged.lengths)
    warnings = (*judged.warnings, lengths_warning(judged.lengths))
    return session_for_lengths(session, judged.lengths), estimate, warnings


def lengths_warning(lengths: VaryingLengths) -> str:
    """Say of a row that its rate is over all sizes, and with what they fit."""
    needs: list[str] = [] if lengths.measure == "none" else [lengths.measure]
    if lengths.pad_to_multiple_of is not None:
        needs.append(f"padding to multiples of {lengths.pad_to_multiple_of}")
    return _OVER_ALL_SIZES.format(
        f", which fit with {' and '.join(needs)}" if needs else ""
    )
