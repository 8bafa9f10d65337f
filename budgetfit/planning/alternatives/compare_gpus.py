"""Compare GPUs: the best settings on each of several cards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from budgetfit.core.plan import GpuComparison
from budgetfit.core.precision import requested_precisions
from budgetfit.errors import InputError
from budgetfit.planning.profiling.block_chain import BlockChain, TrainingSettings
from budgetfit.planning.profiling.first_trace import block_chain_per_precision
from budgetfit.planning.profiling.precision_fallback import fallback_for
from budgetfit.planning.search.accumulation import (
    planned_accumulation,
    recommend_one_micro_batch,
    without_accumulation,
)
from budgetfit.planning.search.baselines import best_fitting, best_with_policy
from budgetfit.planning.search.loss_chunking import search_with_loss_chunks
from budgetfit.planning.search.lowest_peak import lowest_judged
from budgetfit.traces.gc_freeze import freeze_gc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.gpus.table import Gpu
    from budgetfit.planning.search.search import Request
    from budgetfit.workload.workload import Workload


class GpuWithBudget(NamedTuple):
    """A GPU and its memory budget."""

    gpu: Gpu
    budget: Budget


@freeze_gc()
def compare_gpus(  # noqa: PLR0913 - one value each, all needed
    workload: Workload,
    cards: Sequence[GpuWithBudget],
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
    made: list[list[BlockChain]] = []
    rows = []
    for card in cards:
        if progress is not None:
            progress(f"planning for {card.gpu.title}")
        try:
            names = requested_precisions(precision, card.gpu)
        except InputError as error:
            rows.append(
                GpuComparison(
                    gpu=card.gpu, budget=card.budget, estimate=None, problem=str(error)
                )
            )
            continue
        each = _shared(made, card)
        if not each:
            settings = TrainingSettings(
                precision=names[0],
                optimizer=optimizer,
                effective_batch_size=effective_batch_size,
                accumulation=planned_accumulation(
                    effective_batch_size, optimizer_in_backward=False
                ),
                host_ram_bytes=card.budget.host_ram_bytes,
            )
            there = replace(workload, gpu=card.gpu)
            each = block_chain_per_precision(
                there, names, settings, fallback_for(precision), progress
            )
            made.append(each)
        traces = each[0].traces
        rows.append(
            GpuComparison(
                gpu=card.gpu,
                budget=card.budget,
                estimate=_best_on(each, request, card.budget),
                blocks=len(traces.workload.blocks),
                warnings=(
                    *traces.workload.notes[len(workload.notes) :],
                    *traces.cache_notes,
                ),
            )
        )
    return tuple(rows)


def _shared(made: list[list[BlockChain]], card: GpuWithBudget) -> list[BlockChain]:
    """Return the block chains of a card of equal compute capability, on this card."""
    for each in made:
        workload = each[0].traces.workload
        if workload.target == replace(workload, gpu=card.gpu).target:
            host_ram = card.budget.host_ram_bytes
            return [
                BlockChain(
                    block_chain.traces.for_gpu(card.gpu),
                    replace(block_chain.settings, host_ram_bytes=host_ram),
                )
                for block_chain in each
            ]
    return []


def _best_on(
    candidates: Sequence[BlockChain], request: Request, budget: Budget
) -> Estimate:
    """Return the best of the search and the baselines, or the lowest peak."""
    workload = candidates[0].traces.workload
    if request.checkpointing == "as-is":
        request = replace(request, checkpointing=workload.own_checkpointing())
    rated = [_best_of(block_chain, request, budget) for block_chain in candidates]
    found = best_fitting([each for _, each in rated], request)
    if found is not None:
        block_chain = next(block_chain for block_chain, each in rated if each is found)
        return recommend_one_micro_batch(block_chain, found, budget)[0]
    least = min((each for _, each in rated), key=lambda each: each.reserved_bytes)
    accumulates = any(each.settings.accumulation is not None for each in candidates)
    if accumulates and least.timeline.floor_bytes <= budget.usable_bytes:
        return _best_on(without_accumulation(candidates), request, budget)
    return least


def _best_of(
    block_chain: BlockChain, request: Request, budget: Budget
) -> tuple[BlockChain, Estimate]:
    """Return the best in one precision, with its block chain."""
    found_on, found = search_with_loss_chunks(block_chain, request, budget)
    tried = [] if found.estimate is None else [found.estimate]
    if request.checkpointing == "auto":
        blocks = block_chain.traces.workload.blocks
        policies = ("none", "full") if blocks else ("none",)
        tried += [
            best_with_policy(block_chain, name, request, budget) for name in policies
        ]
    return found_on, best_fitting(tried, request) or lowest_judged(
        block_chain, request, budget
    )
