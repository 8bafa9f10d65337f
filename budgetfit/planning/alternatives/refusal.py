"""``DoesNotFitError`` of a plan: its lowest peak and suggestions that would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from budgetfit.applying.optimizers.cpu_offload import NAME as OFFLOADED
from budgetfit.core.plan import Estimate
from budgetfit.core.validation import MAX_BATCH_SIZE
from budgetfit.errors import (
    MAX_SUGGESTIONS,
    DoesNotFitError,
    InputError,
    Suggestion,
    TraceError,
)
from budgetfit.planning.alternatives.training_changes import (
    ADAMW_8BIT,
    PURE_BF16,
    can_use_pure_bf16,
    training_changes,
)
from budgetfit.planning.search.loss_chunking import best_for_objective
from budgetfit.planning.search.lowest_peak import fitting_or_lowest
from budgetfit.planning.session import PlanningSession

if TYPE_CHECKING:
    from torch import nn


OPTIMIZERS: Final = (ADAMW_8BIT, OFFLOADED, "adafactor", "sgd")
# The category of memory that a changed argument can free at most.
FREED_CATEGORY: Final = {
    "optimizer": "optimizer_state",
    "optimizer_in_backward": "gradients",
}
HALF_BYTES: Final = 2
# What the loading of a quantised base depends on.
CHANGES_OF_LOADING: Final = ("method", "prepare_for_kbit", "gpu", "allocator")
# What the floor of a peak holds for, whatever is chosen.
CHOICES: Final = ("checkpointing", "host_ram")


class Refusal(NamedTuple):
    """What a search ends with where nothing fits.

    Attributes:
        session: Of the lowest peak.
        least: The lowest peak.
        floor_bytes: As in the error: the smallest optimizer step of all tried.
        tried: Another session, and its lowest peak.
        offloaded: One that was not tried, as the host's memory does not hold its
            weights and gradients.
    """

    session: PlanningSession
    least: Estimate
    floor_bytes: int
    tried: tuple[PlanningSession, Estimate] | None = None
    offloaded: PlanningSession | None = None

    def and_offloaded(self, other: Refusal) -> Refusal:
        """Return what is said where weights in host memory do not fit either."""
        # Peaks are compared where host memory is not what is missing.
        limit = other.session.budget.host_ram_bytes
        held = limit is None or other.least.host_bytes <= limit
        lower = held and other.least.reserved_bytes < self.least.reserved_bytes
        said, tried = (other, self) if lower else (self, other)
        return said._replace(
            floor_bytes=min(self.floor_bytes, other.floor_bytes),
            tried=(tried.session, tried.least),
        )


class Change(NamedTuple):
    """A change of arguments that may fit.

    ``name`` is the first argument that it changes, or the method that it changes to;
    ``suggestion`` solves it, and returns None where it does not fit.
    """

    name: str
    suggestion: Callable[[], Suggestion | None]


MoreChanges = Callable[[DoesNotFitError], Iterable[Change]]


def does_not_fit_error(
    refusal: Refusal, more_changes: MoreChanges | None
) -> DoesNotFitError:
    """Return the error with need, largest category and suggestions of all changes."""
    session, least, floor_bytes, tried, offloaded = refusal
    sharing, limit = _sharing(least), session.budget.host_ram_bytes
    error = DoesNotFitError(
        needed_bytes=least.reserved_bytes,
        usable_bytes=session.budget.usable_bytes,
        largest=max(least.at_peak_bytes.items(), key=lambda item: item[1]),
        floor_bytes=floor_bytes,
        batch_bytes=least.at_peak_bytes.get("batch", 0),
        notes=session.workload.notes,
        host_bytes=least.host_bytes * sharing,
        host_ram_bytes=None if limit is None else limit * sharing,
    )
    changes = [*changes_of_session(session, least)]
    if tried is not None:
        changes += changes_of_session(*tried)
    if offloaded is not None:
        unlimited = partial(_solved, offloaded, *_more_host_memory(offloaded))
        changes.append(Change("host_ram", unlimited))
    if more_changes is not None:
        changes += more_changes(error)
    if not session.base_loads:
        changes = [each for each in changes if each.name in CHANGES_OF_LOADING]
    return error.with_suggestions(tuple(suggestions(changes)))


def suggestions(changes: Iterable[Change]) -> Iterator[Suggestion]:
    """Yield changed arguments that would fit, each solved for itself."""
    # First the first change of each argument that fits. The second of an argument is
    # told after all of these, so that it is solved only where they are too few, and so
    # on.
    waiting, found = list(changes), 0
    while waiting and found < MAX_SUGGESTIONS:
        names, later = set[str](), list[Change]()
        for change in waiting:
            if change.name in names:
                later.append(change)
                continue
            made = change.suggestion()
            if made is not None:
                names.add(change.name)
                found += 1
                yield made
        waiting = later


def least_weights_bytes(model: nn.Module) -> int:
    """Return what weights take, in half precision at most: nothing makes them less."""
    # Quantised ones take fewer bytes already, and stay so.
    return sum(
        each.numel() * min(each.element_size(), HALF_BYTES)
        for each in model.parameters()
    )


def changes_of_session(session: PlanningSession, least: Estimate) -> Iterator[Change]:
    """Yield changes of training, of the request and of the host's memory."""
    # Left out: all where the weights do not fit; those that free less than the excess
    # of ``least``; and what is recomputed or offloaded where no choice of it can be
    # enough; and expandable segments where the allocator's gaps are not the excess.
    usable_bytes = session.budget.usable_bytes
    several = session.settings.parallelism
    sharded = several is not None and several.engine != "ddp"
    if not sharded and least_weights_bytes(session.workload.model) > usable_bytes:
        return
    missing = least.reserved_bytes - usable_bytes
    proven = least.timeline.floor_bytes > usable_bytes
    gaps_alone = least.allocated_bytes <= usable_bytes
    for arguments, changed in _changes(session):
        name = next(iter(arguments))
        if (proven and name in CHOICES) or (name == "allocator" and not gaps_alone):
            continue
        frees = FREED_CATEGORY.get(name)
        if frees is None or least.at_peak_bytes.get(frees, 0) >= missing:
            yield Change(name, partial(_solved, session, arguments, changed))


def _solved(
    session: PlanningSession,
    arguments: dict[str, object],
    changed: Callable[[], PlanningSession | None],
) -> Suggestion | None:
    """Return the suggestion of changed arguments; None if they do not fit."""
    there = changed()
    if there is None:
        return None
    try:
        found = fitting_or_lowest(there).estimate
    except (InputError, TraceError) as error:
        session.traces.log.append(f"{arguments} is no advice: {error}")
        return None
    if found is None or not found.fits:
        return None
    if "batch_size" in arguments:
        found = _largest_batch(session, found)
        arguments = {"batch_size": found.recipe.batch_size}
    return suggestion(arguments, found)


def _largest_batch(session: PlanningSession, smallest: Estimate) -> Estimate:
    """Return the largest batch that fits, of those searched below the requested one."""
    # ``smallest`` fits, and is returned where no larger one is found.
    asked = session.request.batch_size or MAX_BATCH_SIZE
    try:
        found = best_for_objective(
            session.asking(batch_size=None, objective="batch_size")
        )
    except (InputError, TraceError) as error:
        session.traces.log.append(f"no largest batch is looked for: {error}")
        return smallest
    sizes = range(smallest.recipe.batch_size + 1, asked)
    return found if found and found.recipe.batch_size in sizes else smallest


def suggestion(arguments: dict[str, object], found: Estimate) -> Suggestion:
    """Return the ``Suggestion`` of changed arguments that fit."""
    host_bytes = found.host_bytes * _sharing(found)
    if "host_ram" in arguments:
        arguments = {"host_ram": f"{-(-host_bytes // 2**30)}GiB"}
    keeps = {
        *("checkpointing", "batch_size", "host_ram", "optimizer_in_backward"),
        *("gpu", "vram", "allocator"),
    }
    return Suggestion(
        arguments=arguments,
        recipe=found.recipe,
        peak_bytes=found.reserved_bytes,
        host_bytes=host_bytes,
        samples_per_s=found.samples_per_s,
        changes_training=not keeps.issuperset(arguments),
    )


def _more_host_memory(
    session: PlanningSession,
) -> tuple[dict[str, object], Callable[[], PlanningSession | None]]:
    unlimited = replace(session.budget, host_ram_bytes=None)
    more = session.changed(host_ram_bytes=None).asking(budget=unlimited)
    return {"host_ram": None}, lambda: more


def _sharing(estimate: Estimate) -> int:
    """Return how many ranks share the host memory of a machine."""
    several = estimate.recipe.parallelism
    return 1 if several is None else several.gpus // several.nodes


def _smallest_batch(session: PlanningSession) -> int:
    """Return the smallest batch size that runs; the requested one if none was found."""
    try:
        return session.asking(batch_size=None).smallest_batch
    except TraceError:
        return session.smallest_batch


def _changes(
    session: PlanningSession,
) -> Iterator[tuple[dict[str, object], Callable[[], PlanningSession | None]]]:
    """Yield changed arguments of ``plan``, each with what makes its session."""
    session = session.changed(loss_chunks=1)
    request, settings = session.request, session.settings
    # Updates in the backward are of one micro-batch: a smaller one is another batch.
    in_backward = settings.optimizer_in_backward
    if not in_backward and request.batch_size is not None:
        smallest = _smallest_batch(session)
        if smallest < request.batch_size:
            yield {"batch_size": smallest}, partial(session.asking, batch_size=smallest)
    if request.checkpointing != "auto":
        yield {"checkpointing": "auto"}, partial(session.asking, checkpointing="auto")
    offloads = settings.optimizer == OFFLOADED or session.offloads
    uses_host = offloads or request.checkpointing == "auto"
    if uses_host and session.budget.host_ram_bytes is not None:
        yield _more_host_memory(session)
    if not session.budget.allocator.expandable_segments:
        expanding = session.with_expandable_segments()
        yield {"allocator": expanding.budget.allocator.text}, lambda: expanding
    used = []
    for training_change in training_changes(session):
        used.append(training_change.arguments)
        yield training_change.arguments, training_change.session
    further = [{"optimizer": name} for name in OPTIMIZERS if name != settings.optimizer]
    if can_use_pure_bf16(session):
        further += [{"precision": PURE_BF16}, {"precision": PURE_BF16, **further[0]}]
    for arguments in further:
        if arguments not in used:
            yield {**arguments}, partial(session.changed, **arguments)
