"""Derive the second micro-batch of an optimizer step (gradient accumulation).

It runs the ops of the first, but gradients exist already: each new one is added to them
and freed as soon as autograd has accumulated it. Tracing it would double the time; the
test suite compares both for every kind of model and precision.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from budgetfit.core.step_trace import CATEGORIES
from budgetfit.tracing.recording.steady_state import copies_of_storages

if TYPE_CHECKING:
    from budgetfit.tracing.recording.gradient_log import GradientLog
    from budgetfit.tracing.recording.raw_trace import RawTrace
    from budgetfit.tracing.records import OpRecord

_TEMPORARIES = CATEGORIES.index("temporaries")


def append_micro_batch(raw: RawTrace, gradients: GradientLog) -> None:
    """Insert a second micro-batch after the only one of a step, in place."""
    log = raw.log
    micro = [phase for phase in raw.phases if phase.name in {"forward", "backward"}]
    begin, end = micro[0].start, micro[-1].end
    inside, after = log.events[begin:end], log.events[end:]
    before, known = max(log.events[:end]), len(log.sizes)
    second = _second_events(raw, gradients, begin, end)
    log.events[end:] = second.events
    log.events += [_of_copy(event, second.outliving) for event in after]
    shift = len(second.events)

    behind = log.ops[raw.ops_before_update :]
    log.ops[raw.ops_before_update :] = [
        *_second_ops(raw, gradients, second, begin, inside),
        *(op.moved_to(op.event + shift, {}) for op in behind),
    ]
    raw.phases = [
        *(phase for phase in raw.phases if phase.end <= begin),
        *micro[:-1],
        micro[-1]._replace(end=end + second.start),
        *(
            phase._replace(
                micro_step=1, start=second.at(phase.start), end=second.at(phase.end)
            )
            for phase in micro
        ),
        *(
            phase._replace(
                micro_step=1, start=phase.start + shift, end=phase.end + shift
            )
            for phase in raw.phases
            if phase.start >= end
        ),
    ]
    again = [
        row._replace(
            micro_step=1,
            start=second.at(row.start),
            end=second.at(row.end),
            input_storage=second.copies.get(row.input_storage, row.input_storage),
            output_storage=second.copies.get(row.output_storage, row.output_storage),
        )
        for row in raw.passes
    ]
    first = [
        row._replace(end=end + second.start) if row.end == end else row
        for row in raw.passes
    ]
    raw.passes = [*first, *again]
    _renumber(raw, before, known)


@dataclass(frozen=True, slots=True)
class _SecondMicroBatch:
    """The events of the second micro-batch.

    Attributes:
        events: First the frees of what the first micro-batch still held.
        start: The number of these.
        copies: Storages of the first micro-batch -> their copies in the second.
        outliving: The same, of those that outlive their micro-batch.
        positions: Of each event of the first, among all events; ``ended`` the same
            before gradients are freed there.
        begin: The first event of the first micro-batch.
    """

    events: list[int]
    start: int
    copies: dict[int, int]
    outliving: dict[int, int]
    positions: list[int]
    ended: list[int]
    begin: int

    def at(self, event: int) -> int:
        """Return the position of the copy of an event of the first micro-batch."""
        return self.positions[event - self.begin]


def _second_events(
    raw: RawTrace, gradients: GradientLog, begin: int, end: int
) -> _SecondMicroBatch:
    log = raw.log
    inside, after = log.events[begin:end], log.events[end:]
    allocated = {event - 1 for event in inside if event > 0}
    accumulated = {row.accumulated for row in gradients.rows}
    # The batch and the loss of the first micro-batch, freed before the second starts.
    outliving = [
        -event - 1
        for event in after
        if event < 0 and -event - 1 in allocated and -event - 1 not in accumulated
    ]
    # Gradients that became ``parameter.grad``: in the second they are added and freed.
    added = {
        row.incoming: row.released
        for row in gradients.rows
        if row.incoming == row.accumulated
    }
    freed_at = defaultdict(list)
    for storage, event in added.items():
        freed_at[event].append(storage)
    again = {-event - 1 for event in inside if event < 0} & allocated
    again |= {*outliving, *added}

    copies = copies_of_storages(
        raw, [event - 1 for event in inside if event > 0 and event - 1 in again]
    )
    for storage in added.keys() & copies.keys():
        log.categories[copies[storage]] = _TEMPORARIES
    events = [-(storage + 1) for storage in outliving]
    positions, ended = [], []
    for number, event in enumerate([*inside, 0], start=begin):
        ended.append(end + len(events))
        if number in freed_at:
            events += [-(copies[storage] + 1) for storage in freed_at[number]]
        positions.append(end + len(events))
        copy = copies.get(abs(event) - 1)
        if copy is not None:
            events.append(copy + 1 if event > 0 else -copy - 1)
    held = {storage: copies[storage] for storage in outliving}
    return _SecondMicroBatch(
        events, len(outliving), copies, held, positions, ended, begin
    )


def _of_copy(event: int, copies: dict[int, int]) -> int:
    """Return an event after the second micro-batch; a free is of its batch and loss."""
    return -(copies[-event - 1] + 1) if event < 0 and -event - 1 in copies else event


def _second_ops(
    raw: RawTrace,
    gradients: GradientLog,
    second: _SecondMicroBatch,
    begin: int,
    inside: list[int],
) -> list[OpRecord]:
    """Return the second micro-batch's ops: the first's, and gradient additions."""
    copies, waiting = second.copies, deque(gradients.rows)
    last = {row.incoming: row for row in waiting}  # FSDP2's shards share a storage
    freed: dict[int, int] = defaultdict(int)  # gradients that are added, by event
    ops: list[OpRecord] = []
    position = begin

    def place(event: int) -> int:
        return second.ended[event - begin] + freed[event]

    def add_those_before(number: int) -> None:
        while waiting and waiting[0].ops <= number:
            row = waiting.popleft()
            ops.append(row.add_op._replace(event=place(row.event)))
            if row.incoming == row.accumulated and last[row.incoming] is row:
                freed[row.released] += 1  # before the next

    for number, op in enumerate(raw.log.ops[: raw.ops_before_update]):
        if op.event <= begin:
            continue
        add_those_before(number)
        events = inside[position - begin : op.event - begin]
        position = op.event
        made = [event - 1 for event in events if event > 0]
        if not made or any(storage in copies for storage in made):
            ops.append(op.moved_to(place(op.event), copies))
    add_those_before(raw.ops_before_update)
    return ops


def _renumber(raw: RawTrace, before: int, known: int) -> None:
    """Number storages in the order of their allocations, as a recorded trace does.

    Comparison and depth extrapolation rely on that order.

    ``before``: number of storages at the end of the first micro-batch; ``known``:
    without the second.
    """
    log = raw.log
    new = [*range(before), *range(known, len(log.sizes)), *range(before, known)]
    number = {old: index for index, old in enumerate(new)}

    for rows in (log.sizes, log.categories, log.layers):
        rows[:] = [rows[old] for old in new]
    log.events[:] = [
        number[event - 1] + 1 if event > 0 else -number[-event - 1] - 1
        for event in log.events
    ]
    log.made_from = {
        number[storage]: tuple(number[each] for each in sources)
        for storage, sources in log.made_from.items()
    }
    log.scratch = {number[storage]: row for storage, row in log.scratch.items()}
    log.streams = {number[storage]: row for storage, row in log.streams.items()}
    log.unverified = {number[storage]: op for storage, op in log.unverified.items()}
    log.ops[:] = [op.moved_to(op.event, number) if op.touched else op for op in log.ops]
    raw.passes = [
        row._replace(
            input_storage=number.get(row.input_storage, row.input_storage),
            output_storage=number.get(row.output_storage, row.output_storage),
        )
        for row in raw.passes
    ]
