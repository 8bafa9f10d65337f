"""Schedule of a replay: which event ranges are repeated, and at which batch size.

A trace has two steps of one or two micro-steps. Memory settles over more of them, so
the last micro-step and the last step are repeated if they free all that they allocate.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from budgetfit.core.step_trace import BlockPass, Phase, StepTrace

PASSES = ("forward", "backward")
MICRO_REPEATS = 2  # micro-steps beyond the traced ones
STEADY_REPEATS = 1  # repeats of the last traced step: memory has settled then
# Where the allocator collects garbage by age, it took up to ten steps (0041).
COLLECTING_REPEATS = 10


class EventRange(NamedTuple):
    """Events ``start`` to ``end``, within one phase and one block (-1: no block)."""

    step: int
    micro_step: int
    phase: str
    block: int
    start: int
    end: int


def event_ranges(trace: StepTrace) -> Iterator[EventRange]:
    """Cut the trace at the boundaries of phases and of block passes."""
    inside: dict[tuple[str, int, int], list[BlockPass]] = defaultdict(list)
    for row in trace.passes:
        inside[(row.direction, row.step, row.micro_step)].append(row)
    for phase in trace.phases:
        position = phase.start
        for row in inside[(phase.name, phase.step, phase.micro_step)]:
            if row.start > position:
                yield _event_range(phase, -1, position, row.start)
            yield _event_range(phase, row.block, row.start, row.end)
            position = row.end
        if phase.end > position or phase.start == phase.end:
            yield _event_range(phase, -1, position, phase.end)


def _event_range(phase: Phase, block: int, start: int, end: int) -> EventRange:
    return EventRange(phase.step, phase.micro_step, phase.name, block, start, end)


class ScheduledRange(NamedTuple):
    """An event range to replay with so many samples per micro-batch."""

    event_range: EventRange
    samples: int


def with_micro_steps(
    trace: StepTrace, micro_steps: int
) -> tuple[list[EventRange], list[int]]:
    """Return the event ranges with the untraced micro-steps added, and all events.

    They repeat the last traced micro-step. Only the last batch lives until the
    optimizer has run; the frees of the earlier ones are added as events.
    """
    events = trace.events.tolist()
    result: list[EventRange] = []
    for _, rows in groupby(event_ranges(trace), key=attrgetter("step")):
        step = list(rows)
        last = step[-1].micro_step
        missing = min(micro_steps - 1 - last, MICRO_REPEATS)
        body = [row for row in step if row.micro_step == last and row.phase in PASSES]
        if missing < 1 or last < 1 or not body:
            result += step
            continue
        inside = events[body[0].start : body[-1].end]
        alive = {event for event in inside if event > 0}
        freed = {-event for event in inside if event < 0}
        if not freed <= alive:  # it frees an earlier storage: it cannot be repeated
            result += step
            continue
        left = sorted(alive - freed)
        tail = len(events), len(events) + len(left)
        events += [-event for event in left]
        before = step.index(body[0])
        result += step[:before]
        for number in range(last, last + missing):
            result += [row._replace(micro_step=number) for row in body]
            result.append(EventRange(body[0].step, number, "backward", -1, *tail))
        result += [row._replace(micro_step=last + missing) for row in step[before:]]
    return result, events


def schedule(
    trace: StepTrace,
    traced: list[EventRange],
    batch_size: int,
    then_batch_sizes: tuple[int, ...],
    steady_repeats: int = STEADY_REPEATS,
) -> list[ScheduledRange]:
    """Return all ranges, the last step repeated if it frees all that it allocates.

    Raises:
        ValueError: It does not, so that it cannot run at ``then_batch_sizes``.
    """
    whole = [phase for phase in trace.phases if phase.step == trace.phases[-1].step]
    last = max(row.step for row in traced)
    steady = [row for row in traced if row.step == last]
    parts = [ScheduledRange(row, batch_size) for row in traced]
    repeats = (batch_size,) * steady_repeats + then_batch_sizes
    if last < 1 or not _closed(trace.events[whole[0].start : whole[-1].end]):
        if then_batch_sizes:
            raise ValueError("the last step of this trace cannot be repeated")
        return parts
    for number, samples in enumerate(repeats, start=last + 1):
        parts += [ScheduledRange(row._replace(step=number), samples) for row in steady]
    return parts


def _closed(events: NDArray[np.int32]) -> bool:
    """Return whether these events free exactly what they allocate."""
    return bool(
        (np.sort(events[events > 0]) == np.sort(-events[events < 0])).all()
        if (events > 0).sum() == (events < 0).sum()
        else False
    )
