"""Settings that also hold after the smaller last batch of an epoch.

A ``DataLoader`` without ``drop_last=True`` ends its epochs with one. Its tensors split
cached blocks, so that the next full step may find pieces where it needs a whole
(fragmentation). Mostly the allocator then empties its cache and goes on; but blocks in
use keep what is cached beside them from being released, and memory may run out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

from budgetfit.core.allocator.settings import VARIABLE
from budgetfit.core.budget import Budget
from budgetfit.core.plan import Alternative, Estimate
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import StepTrace
from budgetfit.errors import TraceError
from budgetfit.gpus.table import Gpu
from budgetfit.memory.replay import (
    UNLIMITED_BYTES,
    ReplayAfterTraining,
    replay,
    steady_repeats,
)
from budgetfit.planning.search.smaller_budget import MOST_SEARCHES, with_less_memory
from budgetfit.planning.session import PlanningSession
from budgetfit.utils.format_bytes import format_bytes

# No recorded program reserved 3.6 % more after a smaller last batch (0045).
MOST_GROWTH: Final = 0.04
# Of a sample's time: so much slower, a batch with room is taken without a search, whose
# own results are often as far from the fastest.
SMALL_LOSS: Final = 0.005
LEFT_ROOM: Final = (
    "room is left for the smaller last batch of an epoch: with faster settings the "
    "full batch after it would run out of memory"
)
NEEDS_DROP_LAST: Final = (
    "needs drop_last=True in the DataLoader: after the smaller last batch of an epoch "
    "it would run out of memory"
)


class AfterLastBatch(NamedTuple):
    """What full steps take after a smaller last batch.

    Attributes:
        reserved_bytes: Most that is reserved where memory has no limit.
        runs_out: Whether that exceeds what is usable, and emptying the cache does not
            help.
    """

    reserved_bytes: int
    runs_out: bool


@lru_cache(maxsize=8)  # of the plan's settings and of a row with the same
def after_last_batch(
    trace: StepTrace, recipe: Recipe, gpu: Gpu, budget: Budget
) -> AfterLastBatch:
    """Replay full steps, one with a smaller last batch, and full ones.

    The last batch has one or two samples, half of them, or all but one: after one of
    these most was reserved in nearly all recorded programs (0045).

    Args:
        trace: Valid at several batch sizes.
        recipe: What was traced.
        gpu: The card.
        budget: What the allocator may reserve of it, and its settings.
    """
    full, micro_steps = recipe.batch_size, recipe.gradient_accumulation_steps
    sizes = sorted({n for n in (1, 2, full // 2, full - 1) if 0 < n < full})
    training = ReplayAfterTraining(
        trace,
        full,
        gpu,
        budget,
        limit_bytes=UNLIMITED_BYTES,
        micro_steps=micro_steps,
        repeats=steady_repeats(budget.allocator, gpu),
    )
    reserved = {each: training.reserved_bytes((each, full, full)) for each in sizes}

    def runs_out_after(last: int) -> bool:
        if reserved[last] <= budget.usable_bytes:
            return False
        found = replay(
            trace,
            full,
            gpu,
            limit_bytes=budget.usable_bytes,
            settings=budget.allocator,
            then_batch_sizes=(last, full, full),
            micro_steps=micro_steps,
            breakdown=False,
        )
        return found.failed_bytes is not None

    most = max(reserved.values(), default=0)
    return AfterLastBatch(most, any(map(runs_out_after, sizes)))


def with_room_for_last_batch(
    session: PlanningSession, best: Estimate, others: Sequence[Estimate] = ()
) -> tuple[Estimate, tuple[str, ...]]:
    """Return settings that do not run out of memory after a smaller last batch.

    Also returns warnings. ``best`` fits without one, and is returned where nothing else
    is found, or where one trace does not hold for several batch sizes. ``others`` are
    judged already: the better of them may have room where a search finds less.
    """
    found, smaller = _judged(session, session, best), session
    if found is None or not found.runs_out:
        return best, _warnings(session, best, found)
    roomy = _first_with_room(session, session, _with_fewer_samples(session, best))
    if roomy is not None:
        return roomy
    fitting = sorted((each for each in others if each.fits), key=session.rank)
    tried = best
    for _ in range(MOST_SEARCHES):
        excess = found.reserved_bytes - session.budget.usable_bytes
        result = with_less_memory(smaller, tried, excess)
        if result is None:
            break
        smaller, own, tried = result
        tried = replace(tried, usable_bytes=best.usable_bytes)
        better = [x for x in fitting if session.rank(x) < session.rank(tried)]
        roomy = _first_with_room(session, own, [*better, tried])
        if roomy is not None:
            return roomy
        found = _judged(session, own, tried) or found
    roomy = _first_with_room(session, session, fitting)
    return roomy or (best, warnings_after_last_batch(session, best))


def _with_fewer_samples(session: PlanningSession, best: Estimate) -> Iterator[Estimate]:
    """Yield the same settings with smaller batches while little speed is lost."""
    request, given = session.request, session.settings.effective_batch_size
    if request.objective != "throughput" or request.batch_size or given:
        return
    fewer = 1
    # A batch of one has a trace of its own, and is much slower.
    while (size := best.recipe.batch_size - fewer) > 1:
        found = session.judge(replace(best.recipe, batch_size=size))
        if session.rank(found)[0] > (1 + SMALL_LOSS) * session.rank(best)[0]:
            return
        if found.fits:
            yield found
        fewer *= 2


def _first_with_room(
    session: PlanningSession, own: PlanningSession, estimates: Iterable[Estimate]
) -> tuple[Estimate, tuple[str, ...]] | None:
    """Return the first that does not run out of memory, with its warnings."""
    for each in estimates:
        found = _judged(session, own, each)
        if found is None or not found.runs_out:
            return each, (LEFT_ROOM, *_warnings(session, each, found))
    return None


def with_last_batch_notes(
    session: PlanningSession, best: Estimate, rows: Sequence[Alternative]
) -> tuple[Alternative, ...]:
    """Note of rows that are better than the plan for having no such room."""

    def noted(row: Alternative) -> Alternative:
        if not row.fits or session.rank(row.estimate) >= session.rank(best):
            return row
        found = _judged(session, session, row.estimate)
        runs_out = found is not None and found.runs_out
        notes = [row.note, NEEDS_DROP_LAST] if row.note else [NEEDS_DROP_LAST]
        return replace(row, note="; ".join(notes)) if runs_out else row

    return tuple(noted(row) for row in rows)


def warnings_after_last_batch(
    session: PlanningSession, estimate: Estimate
) -> tuple[str, ...]:
    """Warn where an estimate's settings take too much after a smaller last batch."""
    return _warnings(session, estimate, _judged(session, session, estimate))


def _judged(
    session: PlanningSession, own: PlanningSession, estimate: Estimate
) -> AfterLastBatch | None:
    """Return what the last batch does; None where it cannot be too much, or be told."""
    # ``own``: that of the estimate, whose budget may be a smaller one.
    recipe, most = estimate.recipe, estimate.reserved_bytes * (1 + MOST_GROWTH)
    roomy = most <= session.budget.usable_bytes
    if roomy or recipe.batch_size == 1:
        return None
    try:
        trace = own.traces.affine(recipe)
    except TraceError:  # of two or three samples
        return None
    if len(trace.batch_sizes) == 1:  # no other size follows from it
        return None
    return after_last_batch(trace, recipe, session.workload.gpu, session.budget)


def _warnings(
    session: PlanningSession, estimate: Estimate, found: AfterLastBatch | None
) -> tuple[str, ...]:
    if found is None:
        return ()
    wider, other = session.asking(budget=session.budget.with_expandable_segments()), ""
    excess_bytes = found.reserved_bytes - session.budget.usable_bytes
    if excess_bytes > 0:
        helped = _judged(wider, wider, estimate)
        if helped and helped.reserved_bytes <= session.budget.usable_bytes:
            other = f", or export {VARIABLE}={wider.budget.allocator.shell_text}"
    return last_batch_warnings(found, excess_bytes, other)


def last_batch_warnings(
    found: AfterLastBatch, excess_bytes: int, other: str = ""
) -> tuple[str, ...]:
    """Warn where a smaller last batch takes bytes in excess of what is usable.

    ``other``: what helps beside ``drop_last=True``.
    """
    if excess_bytes <= 0:
        return ()
    then = (
        "the next full batch may run out of memory"
        if found.runs_out
        else "the allocator then empties its cache and goes on, slower"
    )
    text = (
        f"after a smaller last batch {format_bytes(found.reserved_bytes)} would be "
        f"reserved, {format_bytes(excess_bytes)} more "
        f"than are plannable: {then}. Pass drop_last=True to the DataLoader{other}"
    )
    return (text,)
