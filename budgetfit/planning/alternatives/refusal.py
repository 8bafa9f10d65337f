"""``DoesNotFitError`` of a plan: its lowest peak and suggestions that would fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from budgetfit.applying.optimizers.cpu_offload import NAME as OFFLOADED
from budgetfit.errors import DoesNotFitError, InputError, Suggestion, TraceError
from budgetfit.planning.alternatives.training_changes import (
    ADAMW_8BIT,
    PURE_BF16,
    can_use_pure_bf16,
    training_changes,
)
from budgetfit.planning.profiling.block_chain import BlockChain
from budgetfit.planning.search.lowest_peak import fitting_or_lowest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.planning.search.search import Request

OPTIMIZERS: Final = (ADAMW_8BIT, OFFLOADED, "adafactor", "sgd")
# The category of memory that a changed argument can free at most.
FREED_CATEGORY: Final = {
    "optimizer": "optimizer_state",
    "optimizer_in_backward": "gradients",
}


def does_not_fit_error(
    block_chain: BlockChain,
    request: Request,
    least: Estimate,
    budget: Budget,
    floor_bytes: int,
) -> DoesNotFitError:
    """Return the ``DoesNotFitError`` with the need, largest category and suggestions.

    Args:
        block_chain: Of the lowest peak.
        request: As requested.
        least: The lowest peak.
        budget: What it had to fit into.
        floor_bytes: As in the error: the smallest optimizer step of all tried.
    """
    return DoesNotFitError(
        needed_bytes=least.reserved_bytes,
        usable_bytes=budget.usable_bytes,
        largest=max(least.at_peak_bytes.items(), key=lambda item: item[1]),
        floor_bytes=floor_bytes,
        suggestions=tuple(suggestions(block_chain, request, budget, least)),
        notes=block_chain.traces.workload.notes,
    )


class ArgumentChange(NamedTuple):
    """Changed ``arguments`` of ``plan``, with their chain, request and budget."""

    arguments: dict[str, object]
    block_chain: BlockChain
    request: Request
    budget: Budget


def suggestions(
    block_chain: BlockChain, request: Request, budget: Budget, least: Estimate
) -> Iterator[Suggestion]:
    """Yield changed arguments that would fit, each solved for itself.

    Changes that free less than the excess of ``least`` are not tried.
    """
    missing = least.reserved_bytes - budget.usable_bytes
    for change in _changes(block_chain, request, budget):
        frees = FREED_CATEGORY.get(next(iter(change.arguments)))
        if frees is not None and least.at_peak_bytes.get(frees, 0) < missing:
            continue
        try:
            found = fitting_or_lowest(
                change.block_chain, change.request, change.budget
            ).estimate
        except (InputError, TraceError) as error:
            block_chain.traces.log.append(f"{change.arguments} is no advice: {error}")
            continue
        if found is not None and found.fits:
            yield suggestion(change.arguments, found)


def suggestion(arguments: dict[str, object], found: Estimate) -> Suggestion:
    """Return the ``Suggestion`` of changed arguments that fit."""
    if "host_ram" in arguments:
        arguments = {"host_ram": f"{-(-found.host_bytes // 2**30)}GiB"}
    keeps = {"checkpointing", "batch_size", "host_ram", "optimizer_in_backward"}
    return Suggestion(
        arguments=arguments,
        recipe=found.recipe,
        peak_bytes=found.reserved_bytes,
        host_bytes=found.host_bytes,
        samples_per_s=found.samples_per_s,
        changes_training=not keeps.issuperset(arguments),
    )


def _changes(
    block_chain: BlockChain, request: Request, budget: Budget
) -> Iterator[ArgumentChange]:
    settings = replace(block_chain.settings, loss_chunks=1)

    def change(arguments: dict[str, object], **fields: Any) -> ArgumentChange:
        changed = BlockChain(block_chain.traces, replace(settings, **fields))
        return ArgumentChange(arguments, changed, request, budget)

    if request.batch_size is not None and request.batch_size > 1:
        one = replace(request, batch_size=1)
        yield change({"batch_size": 1})._replace(request=one)
    if request.checkpointing != "auto":
        auto = replace(request, checkpointing="auto")
        yield change({"checkpointing": "auto"})._replace(request=auto)
    elif settings.host_ram_bytes is not None:
        unlimited = replace(budget, host_ram_bytes=None)
        more = change({"host_ram": None}, host_ram_bytes=None)
        yield more._replace(budget=unlimited)
    used = []
    for training_change in training_changes(block_chain):
        changed = training_change.block_chain()
        if changed is not None:
            used.append(training_change.arguments)
            yield ArgumentChange(training_change.arguments, changed, request, budget)
    further = [{"optimizer": name} for name in OPTIMIZERS if name != settings.optimizer]
    if can_use_pure_bf16(block_chain):
        further += [{"precision": PURE_BF16}, {"precision": PURE_BF16, **further[0]}]
    for arguments in further:
        if arguments not in used:
            yield change({**arguments}, **arguments)
