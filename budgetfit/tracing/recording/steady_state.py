"""The second step of a training run, made from the first.

The first step creates what then stays: optimizer state, workspaces, scalers. The second
does all the same except for that, so it is the first step's events without the births
of what survived them. Tracing it as well would double the time and show nothing new;
the test suite compares both for every kind of optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.tracing.recording.raw_trace import RawTrace
    from budgetfit.tracing.records import OpRow


def repeat_step(raw: RawTrace) -> None:
    """Append a steady step to a trace of one first step, in place."""
    log, begin = raw.log, raw.step_start
    end = len(log.events)
    step = log.events[begin:]
    freed = {-event - 1 for event in step if event < 0}
    twins: dict[int, int] = {}
    position = [end]  # of each old event in the new step
    for event in step:
        storage = abs(event) - 1
        if event > 0 and storage in freed:
            twins[storage] = twin_of(raw, storage)
            log.events.append(twins[storage] + 1)
        elif event < 0 and storage in twins:
            log.events.append(-(twins[storage] + 1))
        position.append(len(log.events))

    def moved(event: int) -> int:
        return position[event - begin]

    phases = [phase for phase in raw.phases if phase.step == 0]
    raw.phases += [
        phase._replace(step=1, start=moved(phase.start), end=moved(phase.end))
        for phase in phases
    ]
    raw.passes += [
        row._replace(
            step=1,
            start=moved(row.start),
            end=moved(row.end),
            input_storage=twins.get(row.input_storage, row.input_storage),
            output_storage=twins.get(row.output_storage, row.output_storage),
        )
        for row in raw.passes
    ]
    log.ops += [
        op._replace(
            event=moved(op.event),
            touched=tuple(
                (tuple(twins.get(n, n) for n in storages), moved_bytes)
                for storages, moved_bytes in op.touched
            ),
        )
        for op in _repeated_ops(log.ops, log.events, begin, freed)
    ]


def _repeated_ops(
    ops: list[OpRow], events: list[int], begin: int, freed: set[int]
) -> Iterator[OpRow]:
    """Return the ops from ``begin`` on, but for those that only made what stays."""
    position = begin
    for op in ops:
        if op.event <= begin:  # ended before the step
            continue
        born = [event - 1 for event in events[position : op.event] if event > 0]
        position = op.event
        if not born or not freed.isdisjoint(born):
            yield op


def twin_of(raw: RawTrace, storage: int) -> int:
    """Log a storage like another one, without its birth; return its index."""
    log = raw.log
    for rows in (log.sizes, log.categories, log.layers):
        rows.append(rows[storage])
    twin = len(log.sizes) - 1
    for facts in (log.scratch, log.unverified):
        if storage in facts:
            facts[twin] = facts[storage]  # type: ignore[assignment]
    if storage in log.made_from:
        log.made_from[twin] = (storage,)
    return twin
