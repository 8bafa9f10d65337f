"""Which card do I need: the best settings on each of several cards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from budgetfit.core.gpu_comparison import CardRow
from budgetfit.core.requested_precision import precisions
from budgetfit.errors import InputError
from budgetfit.planning.profiling.block_chain import Chains, Setting
from budgetfit.planning.profiling.first_trace import chains_of_each
from budgetfit.planning.profiling.precision_fallback import fallback
from budgetfit.planning.search.accumulation import (
    accumulation_to_plan_for,
    one_micro_batch,
    without_accumulation,
)
from budgetfit.planning.search.baselines import best, best_of_policy
from budgetfit.planning.search.loss_chunking import search_with_loss_parts
from budgetfit.planning.search.lowest_peak import smallest
from budgetfit.traces.gc_freeze import old_objects_left_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.gpus.table import Gpu
    from budgetfit.planning.search.search import Request
    from budgetfit.workload.workload import Subject


class OneCard(NamedTuple):
    """A card, and what of it is usable."""

    gpu: Gpu
    budget: Budget


@old_objects_left_alone()
def compare_cards(  # noqa: PLR0913 - one value each, all needed
    subject: Subject,
    cards: Sequence[OneCard],
    request: Request,
    *,
    precision: str | Sequence[str],
    optimizer: str,
    effective_batch_size: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[CardRow, ...]:
    """Return the best judged settings on each card, in the order of ``cards``.

    Cards of one compute capability run the same programs and share their traces.

    Raises:
        TraceError: If the model cannot be traced.
    """
    made: list[list[Chains]] = []
    rows = []
    for card in cards:
        if progress is not None:
            progress(f"planning for {card.gpu.title}")
        try:
            names = precisions(precision, card.gpu)
        except InputError as error:
            rows.append(
                CardRow(
                    gpu=card.gpu, budget=card.budget, estimate=None, problem=str(error)
                )
            )
            continue
        each = _shared(made, card)
        if not each:
            setting = Setting(
                precision=names[0],
                optimizer=optimizer,
                effective_batch_size=effective_batch_size,
                accumulation=accumulation_to_plan_for(
                    effective_batch_size, optimizer_in_backward=False
                ),
                host_ram_bytes=card.budget.host_ram_bytes,
            )
            there = replace(subject, gpu=card.gpu)
            each = chains_of_each(there, names, setting, fallback(precision), progress)
            made.append(each)
        traces = each[0].traces
        rows.append(
            CardRow(
                gpu=card.gpu,
                budget=card.budget,
                estimate=_best_on(each, request, card.budget),
                blocks=len(traces.subject.blocks),
                warnings=(
                    *traces.subject.notes[len(subject.notes) :],
                    *traces.cache_notes,
                ),
            )
        )
    return tuple(rows)


def _shared(made: list[list[Chains]], card: OneCard) -> list[Chains]:
    """Return the chains of a card of the same capability on this card, if any."""
    for each in made:
        subject = each[0].traces.subject
        if subject.target == replace(subject, gpu=card.gpu).target:
            host_ram = card.budget.host_ram_bytes
            return [
                Chains(
                    chains.traces.on_card(card.gpu),
                    replace(chains.setting, host_ram_bytes=host_ram),
                )
                for chains in each
            ]
    return []


def _best_on(
    candidates: Sequence[Chains], request: Request, budget: Budget
) -> Estimate:
    """Return the best of the solver and the usual practices, or what needs least."""
    subject = candidates[0].traces.subject
    if request.checkpointing == "as-is":
        request = replace(request, checkpointing=subject.own_checkpointing())
    rated = [_best_of(chains, request, budget) for chains in candidates]
    found = best([each for _, each in rated], request)
    if found is not None:
        chains = next(chains for chains, each in rated if each is found)
        return without_accumulation(chains, found, budget)[0]
    least = min((each for _, each in rated), key=lambda each: each.reserved_bytes)
    accumulates = any(each.setting.accumulation is not None for each in candidates)
    if accumulates and least.timeline.floor_bytes <= budget.usable_bytes:
        return _best_on(one_micro_batch(candidates), request, budget)
    return least


def _best_of(
    chains: Chains, request: Request, budget: Budget
) -> tuple[Chains, Estimate]:
    """Return the best in one precision, with the chains that it was found on."""
    own_chains, found = search_with_loss_parts(chains, request, budget)
    tried = [] if found.estimate is None else [found.estimate]
    if request.checkpointing == "auto":
        blocks = chains.traces.subject.blocks
        policies = ("none", "full") if blocks else ("none",)
        tried += [best_of_policy(chains, name, request, budget) for name in policies]
    return own_chains, best(tried, request) or smallest(chains, request, budget)
