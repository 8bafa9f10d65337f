"""The refusal of a plan: what the lowest peak is, and what else would fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from budgetfit.applying.optimizers.cpu_offload import NAME as OFFLOADED
from budgetfit.errors import DoesNotFitError, InputError, Suggestion, TraceError
from budgetfit.planning.alternatives.training_changes import (
    EIGHT_BIT,
    HALF,
    has_half,
    levers,
)
from budgetfit.planning.profiling.block_chain import Chains
from budgetfit.planning.search.lowest_peak import something_that_fits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.planning.search.search import Request

OPTIMIZERS: Final = (EIGHT_BIT, OFFLOADED, "adafactor", "sgd")
# What a change of an argument can free at most.
FREES: Final = {
    "optimizer": "optimizer_state",
    "optimizer_in_backward": "gradients",
}


def does_not_fit(
    chains: Chains,
    request: Request,
    least: Estimate,
    budget: Budget,
    floor_bytes: int,
) -> DoesNotFitError:
    """Return the error: what is needed, what is largest and what would help.

    Args:
        chains: What the lowest peak was found on.
        request: As it was asked for.
        least: The lowest peak.
        budget: What it had to fit into.
        floor_bytes: As in the error: the least optimizer step of all that was tried.
    """
    return DoesNotFitError(
        needed_bytes=least.reserved_bytes,
        usable_bytes=budget.usable_bytes,
        largest=max(least.at_peak_bytes.items(), key=lambda item: item[1]),
        floor_bytes=floor_bytes,
        suggestions=tuple(suggestions(chains, request, budget, least)),
        notes=chains.traces.subject.notes,
    )


class Change(NamedTuple):
    """What a user may do otherwise: ``arguments`` of ``plan``, and what they mean."""

    arguments: dict[str, object]
    chains: Chains
    request: Request
    budget: Budget


def suggestions(
    chains: Chains, request: Request, budget: Budget, least: Estimate
) -> Iterator[Suggestion]:
    """Yield what would fit of what was not allowed, each solved for itself.

    What frees less than ``least`` is too large by is not tried.
    """
    missing = least.reserved_bytes - budget.usable_bytes
    for change in _changes(chains, request, budget):
        frees = FREES.get(next(iter(change.arguments)))
        if frees is not None and least.at_peak_bytes.get(frees, 0) < missing:
            continue
        try:
            found = something_that_fits(
                change.chains, change.request, change.budget
            ).estimate
        except (InputError, TraceError) as error:
            chains.traces.log.append(f"{change.arguments} is no advice: {error}")
            continue
        if found is not None and found.fits:
            yield suggestion(change.arguments, found)


def suggestion(arguments: dict[str, object], found: Estimate) -> Suggestion:
    """Return a change that fits as what a user is told."""
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


def _changes(chains: Chains, request: Request, budget: Budget) -> Iterator[Change]:
    setting = replace(chains.setting, loss_chunks=1)

    def change(arguments: dict[str, object], **fields: Any) -> Change:  # noqa: ANN401
        changed = Chains(chains.traces, replace(setting, **fields))
        return Change(arguments, changed, request, budget)

    if request.batch_size is not None and request.batch_size > 1:
        one = replace(request, batch_size=1)
        yield change({"batch_size": 1})._replace(request=one)
    if request.checkpointing != "auto":
        auto = replace(request, checkpointing="auto")
        yield change({"checkpointing": "auto"})._replace(request=auto)
    elif setting.host_ram_bytes is not None:
        unlimited = replace(budget, host_ram_bytes=None)
        more = change({"host_ram": None}, host_ram_bytes=None)
        yield more._replace(budget=unlimited)
    pulled = []
    for lever in levers(chains):
        changed = lever.chains()
        if changed is not None:
            pulled.append(lever.arguments)
            yield Change(lever.arguments, changed, request, budget)
    further = [{"optimizer": name} for name in OPTIMIZERS if name != setting.optimizer]
    if has_half(chains):
        further += [{"precision": HALF}, {"precision": HALF, **further[0]}]
    for arguments in further:
        if arguments not in pulled:
            yield change({**arguments}, **arguments)
