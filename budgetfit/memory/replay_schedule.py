"""Schedule of a replay: which event ranges are repeated, and at which batch size.

A trace has two steps of one or two micro-steps. Memory settles over more of them, so
the last micro-step and the last step are repeated if they leave as much as they found.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from budgetfit.core.step_trace import BlockPass, Phase, StepTrace

PASSES = ("forward", "backward")
MICRO_REPEATS = 2  # micro-steps beyond the traced ones
STEADY_REPEATS = 1  # repeats of the last traced step: memory has settled then
# Of one that leaves things to the next: blocks swap their places, up to 15 steps long.
TURNING_REPEATS = 20
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


def units_of(parts: Iterable[ScheduledRange]) -> Iterator[tuple[ScheduledRange, ...]]:
    """Cut a schedule where a micro-step, the optimizer or an added range begins."""
    # The forward and backward of a repeated micro-step are a unit, whose events are
    # those of the micro-step before; what follows the two may differ.
    unit: list[ScheduledRange] = []
    for part in parts:
        if unit and not _go_on(unit[-1].event_range, part.event_range):
            yield tuple(unit)
            unit = []
        unit.append(part)
    if unit:
        yield tuple(unit)


def _go_on(before: EventRange, row: EventRange) -> bool:
    """Whether a range goes on with the same passes, or with the same other phases."""
    return (row.step, row.micro_step, row.phase in PASSES, row.start) == (
        before.step,
        before.micro_step,
        before.phase in PASSES,
        before.end,
    )


def with_micro_steps(
    trace: StepTrace, micro_steps: int
) -> tuple[list[EventRange], list[int]]:
    """Return the event ranges with the untraced micro-steps added, and all events."""
    # They repeat the last traced micro-step. Only the last batch lives until the
    # optimizer has run; the frees of the earlier ones are added as events.
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


def schedule(  # noqa: PLR0913, PLR0917 - a trace and the settings of its replay
    trace: StepTrace,
    traced: list[EventRange],
    events: list[int],
    batch_size: int,
    then_batch_sizes: tuple[int, ...],
    steady_repeats: int = STEADY_REPEATS,
) -> list[ScheduledRange]:
    """Return all ranges, the last step repeated if it leaves as much as it found.

    That is if it frees all that it allocates, or, of each thing that it leaves to the
    next step (outputs that a loop holds), one that the step before has left. Such
    things take turns: their events are added to ``events``.

    Raises:
        ValueError: It does not, so that it cannot run at ``then_batch_sizes``.
    """
    last = max(row.step for row in traced)
    steady = [row for row in traced if row.step == last]
    parts = [ScheduledRange(row, batch_size) for row in traced]
    turns = storages_in_turns(
        trace, [e for row in steady for e in events[row.start : row.end]]
    )
    count = max(steady_repeats, TURNING_REPEATS if turns else 0)
    repeats = (batch_size,) * count + then_batch_sizes
    if last < 1 or turns is None:
        if then_batch_sizes:
            raise ValueError("the last step of this trace cannot be repeated")
        return parts
    others = _renamed(steady, events, turns) if turns else steady
    for number, samples in enumerate(repeats, start=last + 1):
        steady, others = others, steady
        parts += [ScheduledRange(row._replace(step=number), samples) for row in steady]
    return parts


def last_step(trace: StepTrace) -> tuple[list[EventRange], list[int]]:
    """Return the event ranges of the last step, and all events."""
    rows = list(event_ranges(trace))
    last = [row for row in rows if row.step == rows[-1].step]
    return last, trace.events.tolist()


def append_next_step(
    trace: StepTrace, step: int, distance: int, freed: Collection[int] = ()
) -> StepTrace:
    """Return the trace with the training step that follows ``step``, at its end.

    Ops are those of the trace: what is appended is memory alone.

    Args:
        trace: With ``step`` and maybe something after it.
        step: A training step that can be repeated.
        distance: Which of the training steps after it: 1 is the next one.
        freed: Storages that it would free and that are freed already.

    Raises:
        ValueError: The step does not leave as much as it found.
    """
    rows = [phase for phase in trace.phases if phase.step == step]
    start = rows[0].start
    events = trace.events[start : rows[-1].end].tolist()
    turns = storages_in_turns(trace, events)
    if turns is None:
        raise ValueError("the last step of this trace cannot be repeated")
    named = [_named(turns if distance % 2 else {}, event) for event in events]
    kept = np.array([event > 0 or -event - 1 not in freed for event in named], bool)
    places = len(trace.events) + np.concatenate([[0], np.cumsum(kept)])
    number = trace.phases[-1].step + 1
    return replace(
        trace,
        events=np.concatenate(
            [trace.events, np.array(named, trace.events.dtype)[kept]]
        ),
        phases=(
            *trace.phases,
            *(
                row._replace(
                    step=number,
                    start=int(places[row.start - start]),
                    end=int(places[row.end - start]),
                )
                for row in rows
            ),
        ),
    )


def storages_in_turns(trace: StepTrace, events: list[int]) -> dict[int, int] | None:
    """Return the storages of a step that take turns with those of the step before.

    Numbered as in events. Empty: it frees what it allocates. None: it allocates what it
    does not free, or the other way round.
    """
    allocated = {event for event in events if event > 0}
    freed = {-event for event in events if event < 0}
    left, found = allocated - freed, freed - allocated

    streams = trace.side_streams()

    def size(storage: int) -> tuple[object, ...]:
        row = storage - 1
        rule = int(trace.scratch_index[row])
        sized = int(trace.fixed_bytes[row]), int(trace.bytes_per_sample[row])
        scratch = trace.scratch[rule] if rule >= 0 else ()
        return (*sized, scratch, streams.get(storage, 0))

    before = sorted(found, key=lambda each: (repr(size(each)), each))
    after = sorted(left, key=lambda each: (repr(size(each)), each))
    if [size(each) for each in before] != [size(each) for each in after]:
        return None
    pairs = list(zip(before, after, strict=True))
    return dict([*pairs, *((after, before) for before, after in pairs)])


def _renamed(
    rows: list[EventRange], events: list[int], names: dict[int, int]
) -> list[EventRange]:
    """Return copies of the ranges with other storages, added to ``events``."""
    result = []
    for row in rows:
        start = len(events)
        events += [_named(names, event) for event in events[row.start : row.end]]
        result.append(row._replace(start=start, end=len(events)))
    return result


def _named(names: dict[int, int], event: int) -> int:
    """Return an event of the storage that has another name."""
    return names.get(event, event) if event > 0 else -names.get(-event, -event)
