"""Derive the steady-state (second) step of a training run from the first.

The first step allocates what then persists: optimizer state, workspaces, scalers. The
second repeats its events without those allocations. Tracing it would double the time;
the test suite compares both for every kind of optimizer, and for FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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
    copies = copies_of_storages(
        raw, [event - 1 for event in step if event > 0 and event - 1 in freed]
    )
    position, added = [end], log.events  # of each old event in the new step
    for event in step:
        copy = copies.get(abs(event) - 1)
        if copy is not None:
            added.append(copy + 1 if event > 0 else -copy - 1)
        position.append(len(added))

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


def copies_of_storages(raw: RawTrace, storages: Sequence[int]) -> dict[int, int]:
    """Add copies of storages to the log, without events; return their indices."""
    log = raw.log
    copies = {storage: n for n, storage in enumerate(storages, start=len(log.sizes))}
    for rows in (log.sizes, log.categories, log.layers):
        rows += [rows[storage] for storage in storages]
    columns: tuple[dict[int, Any], ...] = log.scratch, log.unverified, log.streams
    for column in columns:
        column.update({copies[n]: column[n] for n in storages if n in column})
    log.made_from.update({copies[n]: (n,) for n in storages if n in log.made_from})
    return copies
