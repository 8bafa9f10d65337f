"""``DoesNotFitError`` of a plan: its lowest peak and suggestions that would fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from budgetfit.applying.optimizers.cpu_offload import NAME as OFFLOADED
from budgetfit.errors import DoesNotFitError, InputError, Suggestion, TraceError
from budgetfit.planning.alternatives.training_changes import (
    ADAMW_8BIT,
    PURE_BF16,
    can_use_pure_bf16,
    training_changes,
)
from budgetfit.planning.search.lowest_peak import fitting_or_lowest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.core.plan import Estimate
    from budgetfit.planning.session import PlanningSession

OPTIMIZERS: Final = (ADAMW_8BIT, OFFLOADED, "adafactor", "sgd")
# The category of memory that a changed argument can free at most.
FREED_CATEGORY: Final = {
    "optimizer": "optimizer_state",
    "optimizer_in_backward": "gradients",
}


def does_not_fit_error(
    session: PlanningSession, least: Estimate, floor_bytes: int
) -> DoesNotFitError:
    """Return the ``DoesNotFitError`` with the need, largest category and suggestions.

    Args:
        session: Of the lowest peak.
        least: The lowest peak.
        floor_bytes: As in the error: the smallest optimizer step of all tried.
    """
    return DoesNotFitError(
        needed_bytes=least.reserved_bytes,
        usable_bytes=session.budget.usable_bytes,
        largest=max(least.at_peak_bytes.items(), key=lambda item: item[1]),
        floor_bytes=floor_bytes,
        batch_bytes=least.at_peak_bytes.get("batch", 0),
        suggestions=tuple(suggestions(session, least)),
        notes=session.workload.notes,
        host_bytes=least.host_bytes,
        host_ram_bytes=session.budget.host_ram_bytes,
    )


def suggestions(session: PlanningSession, least: Estimate) -> Iterator[Suggestion]:
    """Yield changed arguments that would fit, each solved for itself.

    Changes that free less than the excess of ``least`` are not tried.
    """
    missing = least.reserved_bytes - session.budget.usable_bytes
    for arguments, changed in _changes(session):
        frees = FREED_CATEGORY.get(next(iter(arguments)))
        if frees is not None and least.at_peak_bytes.get(frees, 0) < missing:
            continue
        try:
            found = fitting_or_lowest(changed).estimate
        except (InputError, TraceError) as error:
            session.traces.log.append(f"{arguments} is no advice: {error}")
            continue
        if found is not None and found.fits:
            yield suggestion(arguments, found)


def suggestion(arguments: dict[str, object], found: Estimate) -> Suggestion:
    """Return the ``Suggestion`` of changed arguments that fit."""
    if "host_ram" in arguments:
        several = found.recipe.parallelism
        sharing = 1 if several is None else several.gpus // several.nodes
        arguments = {"host_ram": f"{-(-found.host_bytes * sharing // 2**30)}GiB"}
    keeps = {
        *("checkpointing", "batch_size", "host_ram", "optimizer_in_backward"),
        *("gpu", "vram"),
    }
    return Suggestion(
        arguments=arguments,
        recipe=found.recipe,
        peak_bytes=found.reserved_bytes,
        host_bytes=found.host_bytes,
        samples_per_s=found.samples_per_s,
        changes_training=not keeps.issuperset(arguments),
    )


def _smallest_batch(session: PlanningSession) -> int:
    """Return the smallest batch size that runs; the requested one if none was found."""
    try:
        return session.asking(batch_size=None).smallest_batch
    except TraceError:
        return session.smallest_batch


def _changes(
    session: PlanningSession,
) -> Iterator[tuple[dict[str, object], PlanningSession]]:
    """Yield changed arguments of ``plan``, each with its session."""
    session = session.changed(loss_chunks=1)
    request, settings = session.request, session.settings
    # Updates in the backward are of one micro-batch: a smaller one is another batch.
    in_backward = settings.optimizer_in_backward
    if not in_backward and request.batch_size is not None:
        smallest = _smallest_batch(session)
        if smallest < request.batch_size:
            yield {"batch_size": smallest}, session.asking(batch_size=smallest)
    if request.checkpointing != "auto":
        yield {"checkpointing": "auto"}, session.asking(checkpointing="auto")
    uses_host = request.checkpointing == "auto" or settings.optimizer == OFFLOADED
    if uses_host and session.budget.host_ram_bytes is not None:
        unlimited = replace(session.budget, host_ram_bytes=None)
        more = replace(session.changed(host_ram_bytes=None), budget=unlimited)
        yield {"host_ram": None}, more
    used = []
    for training_change in training_changes(session):
        changed = training_change.session()
        if changed is not None:
            used.append(training_change.arguments)
            yield training_change.arguments, changed
    further = [{"optimizer": name} for name in OPTIMIZERS if name != settings.optimizer]
    if can_use_pure_bf16(session):
        further += [{"precision": PURE_BF16}, {"precision": PURE_BF16, **further[0]}]
    for arguments in further:
        if arguments not in used:
            yield {**arguments}, session.changed(**arguments)
