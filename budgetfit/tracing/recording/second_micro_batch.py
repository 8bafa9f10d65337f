"""The second micro-batch of an optimizer step, made from the first.

It runs the same ops. What differs is that gradients are there already: each new one is
added to them and freed as soon as autograd has accumulated it. Tracing it as well would
double the time and show nothing new; the test suite compares both for every kind of
model and precision.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from budgetfit.core.step_trace import CATEGORIES
from budgetfit.tracing.recording.steady_state import twin_of

if TYPE_CHECKING:
    from budgetfit.tracing.recording.gradient_log import GradientLog
    from budgetfit.tracing.recording.raw_trace import RawTrace
    from budgetfit.tracing.records import OpRow

_TEMPORARIES = CATEGORIES.index("temporaries")


def repeat_micro_step(raw: RawTrace, gradients: GradientLog) -> None:
    """Insert a second micro-batch behind the only one of a step, in place."""
    log = raw.log
    micro = [phase for phase in raw.phases if phase.name in {"forward", "backward"}]
    begin, end = micro[0].start, micro[-1].end
    inside, after = log.events[begin:end], log.events[end:]
    before, known = max(log.events[:end]), len(log.sizes)
    second = _second_events(raw, gradients, begin, end)
    log.events[end:] = second.events
    log.events += [_of_twin(event, second.waiting) for event in after]
    shift = len(second.events)

    behind = log.ops[raw.ops_before_update :]
    log.ops[raw.ops_before_update :] = [
        *_second_ops(raw, gradients, second, begin, inside),
        *(op._replace(event=op.event + shift) for op in behind),
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
            input_storage=second.twins.get(row.input_storage, row.input_storage),
            output_storage=second.twins.get(row.output_storage, row.output_storage),
        )
        for row in raw.passes
    ]
    first = [
        row._replace(end=end + second.start) if row.end == end else row
        for row in raw.passes
    ]
    raw.passes = [*first, *again]
    _number_as_they_come(raw, before, known)


@dataclass(frozen=True, slots=True)
class _Second:
    """The events that are inserted.

    Attributes:
        events: First the deaths of what the first micro-batch still held.
        start: How many these are.
        twins: Storages of the first micro-batch -> those that stand for them.
        waiting: The same, of those that outlive it.
        positions: Of each event of the first, among all events; ``ended`` the same
            before gradients are freed there.
        begin: The first event of the first.
    """

    events: list[int]
    start: int
    twins: dict[int, int]
    waiting: dict[int, int]
    positions: list[int]
    ended: list[int]
    begin: int

    def at(self, event: int) -> int:
        """Return where an event of the first micro-batch has its like."""
        return self.positions[event - self.begin]


def _second_events(
    raw: RawTrace, gradients: GradientLog, begin: int, end: int
) -> _Second:
    log = raw.log
    inside, after = log.events[begin:end], log.events[end:]
    born = {event - 1 for event in inside if event > 0}
    kept = {row.kept for row in gradients.rows}
    # The batch and the loss: the first micro-batch's are gone before the second comes.
    waiting = [
        -event - 1
        for event in after
        if event < 0 and -event - 1 in born and -event - 1 not in kept
    ]
    # Gradients that the parameters took as they came: now they are added and freed.
    added = {
        row.storage: row.event for row in gradients.rows if row.storage == row.kept
    }
    freed_at = defaultdict(list)
    for storage, event in added.items():
        freed_at[event].append(storage)
    again = {-event - 1 for event in inside if event < 0} & born
    again |= {*waiting, *added}

    events = [-(storage + 1) for storage in waiting]
    twins: dict[int, int] = {}
    positions, ended = [], []
    for number, event in enumerate([*inside, 0], start=begin):
        ended.append(end + len(events))
        events += [-(twins[storage] + 1) for storage in freed_at[number]]
        positions.append(end + len(events))
        storage = abs(event) - 1
        if event > 0 and storage in again:
            twins[storage] = twin_of(raw, storage)
            if storage in added:
                log.categories[twins[storage]] = _TEMPORARIES
            events.append(twins[storage] + 1)
        elif event < 0 and storage in twins:
            events.append(-(twins[storage] + 1))
    held = {storage: twins[storage] for storage in waiting}
    return _Second(events, len(waiting), twins, held, positions, ended, begin)


def _of_twin(event: int, twins: dict[int, int]) -> int:
    """Return a death behind the second micro-batch: of its own batch and loss."""
    return -(twins[-event - 1] + 1) if event < 0 and -event - 1 in twins else event


def _second_ops(
    raw: RawTrace,
    gradients: GradientLog,
    second: _Second,
    begin: int,
    inside: list[int],
) -> list[OpRow]:
    """Return the second micro-batch's ops: the first's, and each gradient's adding."""
    twins, waiting = second.twins, list(gradients.rows)
    freed: dict[int, int] = defaultdict(int)  # gradients, by the event they came at
    ops: list[OpRow] = []
    position = begin

    def place(event: int) -> int:
        return second.ended[event - begin] + freed[event]

    def add_those_before(number: int) -> None:
        while waiting and waiting[0].ops <= number:
            row = waiting.pop(0)
            ops.append(row.op._replace(event=place(row.event)))
            freed[row.event] += row.storage == row.kept  # before the next is added

    for number, op in enumerate(raw.log.ops[: raw.ops_before_update]):
        if op.event <= begin:
            continue
        add_those_before(number)
        born = inside[position - begin : op.event - begin]
        position = op.event
        made = [event - 1 for event in born if event > 0]
        if not made or any(storage in twins for storage in made):
            touched = tuple(
                (tuple(twins.get(n, n) for n in storages), moved_bytes)
                for storages, moved_bytes in op.touched
            )
            ops.append(op._replace(event=place(op.event), touched=touched))
    add_those_before(raw.ops_before_update)
    return ops


def _number_as_they_come(raw: RawTrace, before: int, known: int) -> None:
    """Number the second micro-batch's storages before those of the optimizer step.

    Traces are compared by these numbers, and are made longer by them.

    Args:
        raw: Its last storages are the second micro-batch's.
        before: Storages that were there when the first one ended.
        known: Storages that were there before the second one was made.
    """
    log = raw.log
    new = [*range(before), *range(known, len(log.sizes)), *range(before, known)]
    number = {old: index for index, old in enumerate(new)}

    def renamed(event: int) -> int:
        return number[event - 1] + 1 if event > 0 else -(number[-event - 1] + 1)

    for rows in (log.sizes, log.categories, log.layers):
        rows[:] = [rows[old] for old in new]
    log.events[:] = [renamed(event) for event in log.events]
    log.made_from = {
        number[storage]: tuple(number[each] for each in sources)
        for storage, sources in log.made_from.items()
    }
    log.scratch = {number[storage]: row for storage, row in log.scratch.items()}
    log.unverified = {number[storage]: op for storage, op in log.unverified.items()}
    log.ops[:] = [
        op._replace(
            touched=tuple(
                (tuple(number[each] for each in storages), moved_bytes)
                for storages, moved_bytes in op.touched
            )
        )
        if op.touched
        else op
        for op in log.ops
    ]
    raw.passes = [
        row._replace(
            input_storage=number.get(row.input_storage, row.input_storage),
            output_storage=number.get(row.output_storage, row.output_storage),
        )
        for row in raw.passes
    ]
