"""Derive the steady-state (second) step of a training run from the first.

The first step allocates what then persists: optimizer state, workspaces, scalers. The
second repeats its events without those allocations. Tracing it would double the time;
the test suite compares both for every kind of optimizer, and for FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from budgetfit.tracing.recording.raw_trace import RawTrace
    from budgetfit.tracing.records import OpRecord


_SMALLEST_BLOCK = 512  # bytes of the allocator; scalars kept for a log take one


def keeps_tensors(raw: RawTrace) -> bool:
    """Whether the forward leaves tensors to the next step, which may replace them."""
    # A recurrent state, a moving average: old and new exist at once, which only tracing
    # the next step shows.
    log = raw.log
    freed = {-event - 1 for event in log.events if event < 0}
    return any(
        event > 0 and event - 1 not in freed and log.sizes[event - 1] > _SMALLEST_BLOCK
        for phase in raw.phases
        if phase.name == "forward"
        for event in log.events[phase.start : phase.end]
    )


def append_steady_step(raw: RawTrace) -> None:
    """Append a steady-state step to a trace of one first step, in place."""
    log = raw.log
    phases = [phase for phase in raw.phases if phase.step == 0]
    begin, end = phases[0].start, len(log.events)
    step = log.events[begin:]
    freed = {-event - 1 for event in step if event < 0}
    copies: dict[int, int] = {}
    position = [end]  # of each old event in the new step
    for event in step:
        storage = abs(event) - 1
        if event > 0 and storage in freed:
            copies[storage] = copy_storage(raw, storage)
            log.events.append(copies[storage] + 1)
        elif event < 0 and storage in copies:
            log.events.append(-(copies[storage] + 1))
        position.append(len(log.events))

    def moved(event: int) -> int:
        return position[event - begin]

    raw.phases += [
        phase._replace(step=1, start=moved(phase.start), end=moved(phase.end))
        for phase in phases
    ]
    raw.passes += [
        row._replace(
            step=1,
            start=moved(row.start),
            end=moved(row.end),
            input_storage=copies.get(row.input_storage, row.input_storage),
            output_storage=copies.get(row.output_storage, row.output_storage),
        )
        for row in raw.passes
    ]
    log.ops += [
        op.moved_to(moved(op.event), copies)
        for op in _repeated_ops(log.ops, log.events, begin, freed)
    ]


def _repeated_ops(
    ops: list[OpRecord], events: list[int], begin: int, freed: set[int]
) -> Iterator[OpRecord]:
    """Return the ops from ``begin`` on, except those that only made what persists."""
    position = begin
    for op in ops:
        if op.event <= begin:  # ended before the step
            continue
        made = [event - 1 for event in events[position : op.event] if event > 0]
        position = op.event
        if not made or not freed.isdisjoint(made):
            yield op


def copy_storage(raw: RawTrace, storage: int) -> int:
    """Add a copy of a storage to the log, without an event; return its index."""
    log = raw.log
    for rows in (log.sizes, log.categories, log.layers):
        rows.append(rows[storage])
    copy = len(log.sizes) - 1
    for column in (log.scratch, log.unverified, log.streams):
        if storage in column:
            column[copy] = column[storage]  # type: ignore[assignment]
    if storage in log.made_from:
        log.made_from[copy] = (storage,)
    return copy
