"""Label each event and op of a shortened model's trace with its period of a run.

In forward and backward the block passes decide. Elsewhere (set-up, optimizer, frees at
the end of a phase) the layer of the storage does: a loop over all layers shows as items
of period 2 next to items of period 3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import StepTrace
from budgetfit.tracing.blocks.repeated_runs import KEPT_PERIODS, NotRepeatedError
from budgetfit.tracing.depth_extrapolation.owned_trace import IntArray, OwnedTrace
from budgetfit.tracing.depth_extrapolation.run_layout import (
    FIRST_MIDDLE,
    SECOND_MIDDLE,
    RunLayout,
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events and ops of a trace merged in order, each labelled with its period.

    Attributes:
        is_op: Whether an item is an op.
        index: Its number among the events or the ops.
        of_event: Positions of events on the timeline.
        period: The period that each belongs to, 1 to 4; 0 for none.
        storage: The storage of each event; -1 for ops.
        op_event: The number of events before each op.
    """

    is_op: NDArray[np.bool_]
    index: IntArray
    of_event: IntArray
    period: IntArray
    storage: IntArray
    op_event: IntArray

    def after(self, event: int) -> int:
        """Return the position after the first ``event`` events."""
        return event + int(np.searchsorted(self.op_event, event, side="right"))


class MiddleSpans(NamedTuple):
    """Adjacent spans of the timeline, of one middle period and of the other.

    ``rising``: the span of the first middle period comes first.
    """

    first: int
    second: int
    length: int
    rising: bool


def label_timeline(owned: OwnedTrace, layout: RunLayout) -> Timeline:
    """Merge events and ops and label each with its period.

    Raises:
        NotRepeatedError: If the run's blocks do not run in order.
    """
    trace = owned.trace
    events, op_event = trace.events, trace.ops.event
    counted = np.arange(len(events))
    of_event = counted + np.searchsorted(op_event, counted, side="right")
    of_op = op_event + np.arange(len(op_event))
    total = len(events) + len(op_event)
    is_op = np.zeros(total, bool)
    is_op[of_op] = True
    index = np.empty(total, np.int64)
    index[of_event], index[of_op] = counted, np.arange(len(op_event))
    storage = np.full(total, -1, np.int64)
    storage[of_event] = np.abs(events) - 1
    period = np.zeros(total, np.int64)
    timeline = Timeline(is_op, index, of_event, period, storage, op_event)
    period_of = layout.kept_period_of_layers()
    by_owner, by_layer = period_of[owned.owner], period_of[trace.layer]
    label = np.where(by_owner > 0, by_owner, by_layer)
    period[of_event] = label[np.abs(events) - 1]
    by_owner, by_layer = period_of[owned.op_owner], period_of[trace.ops.layer]
    period[of_op] = np.where(by_owner > 0, by_owner, by_layer)
    has_owner = np.zeros(total, bool)
    has_owner[of_op] = owned.op_owner >= 0
    in_pass = np.zeros(total, bool)
    for start, end, number in _pass_spans(trace, layout, timeline):
        inside = np.arange(start, end)
        # An op of the optimizer may follow at once, with no event between.
        inside = inside[~has_owner[inside]]
        period[inside], in_pass[inside] = number, True
    allocated_in = np.zeros(len(trace.layer), np.int64)
    allocations = of_event[events > 0]
    allocated_in[storage[allocations]] = period[allocations]
    unlabelled = ~in_pass & ~is_op & (period == 0)
    period[unlabelled] = allocated_in[storage[unlabelled]]
    frees = np.zeros(total, bool)
    frees[of_event[events < 0]] = True
    _relabel_late_frees(period, frees, ~in_pass)
    return timeline


def _relabel_late_frees(
    period: IntArray, frees: NDArray[np.bool_], outside: NDArray[np.bool_]
) -> None:
    """Label frees between items of one period as that period's, in place."""
    # An optimizer's loop frees one parameter's tensors while it updates the next.
    working = np.flatnonzero(~frees)
    late = np.flatnonzero(frees & outside)
    after = np.searchsorted(working, late)
    inner = (after > 0) & (after < len(working))
    late, after = late[inner], after[inner]
    earlier, later = working[after - 1], working[after]
    before, behind = period[earlier], period[later]
    between = (before == behind) & (before > 0) & outside[earlier]
    period[late[between]] = before[between]


def _frees(trace: StepTrace, timeline: Timeline, position: int) -> bool:
    return bool(
        not timeline.is_op[position] and trace.events[timeline.index[position]] < 0
    )


def _end_of_last(
    trace: StepTrace, timeline: Timeline, span: tuple[int, int, int], stop: int
) -> int:
    """Return where a phase's last pass, of start, end and period, ends."""
    # Frees right after it belong to its block, as with the others. But what an autograd
    # function keeps in attributes of its context, as that of int8 weights does, is
    # freed with the whole graph, block after block.
    start, end, number = span
    last = end
    while last > start and timeline.is_op[last - 1]:  # of the optimizer
        last -= 1
    begin = last
    while begin > start and _frees(trace, timeline, begin - 1):
        begin -= 1
    while end < stop and _frees(trace, timeline, end):
        last = end = end + 1
    freed = timeline.period[begin:last]
    if not {FIRST_MIDDLE, SECOND_MIDDLE}.issubset(freed.tolist()):
        return end
    return begin + int(np.flatnonzero((freed != 0) & (freed != number))[0])


def _pass_spans(
    trace: StepTrace, layout: RunLayout, timeline: Timeline
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, period) of forwards and backwards, as timeline positions."""
    period_of = layout.kept_period_of_blocks()
    for phase in trace.phases:
        rows = [
            row
            for row in trace.passes
            if (row.direction, row.step, row.micro_step)
            == (phase.name, phase.step, phase.micro_step)
        ]
        found = {period_of[row.block] for row in rows if row.block in period_of}
        if not found:
            continue
        if found != set(range(1, KEPT_PERIODS + 1)):
            raise NotRepeatedError("some of its blocks have no pass of their own")
        starts = [
            min(row.start for row in rows if period_of.get(row.block) == period)
            for period in range(1, KEPT_PERIODS + 1)
        ]
        rising = phase.name == "forward"
        order = range(KEPT_PERIODS)[:: 1 if rising else -1]
        last = order[-1] + 1
        end = max(row.end for row in rows if period_of.get(row.block) == last)
        edges = [starts[n] for n in order] + [end]
        if edges != sorted(edges):
            raise NotRepeatedError("its blocks run in no plain order")
        for row in rows:
            if row.block not in period_of and edges[0] <= row.start < end:
                raise NotRepeatedError("other blocks run between its blocks")
        places = [timeline.after(edge) for edge in edges]
        span = places[-2], places[-1], last
        places[-1] = _end_of_last(trace, timeline, span, timeline.after(phase.end))
        for n, start, stop in zip(order, places, places[1:], strict=False):
            yield start, stop, n + 1


def middle_spans(timeline: Timeline) -> list[MiddleSpans]:
    """Return the adjacent spans of the two middle periods.

    Raises:
        NotRepeatedError: If a span of one has no counterpart next to it.
    """
    period = timeline.period
    edges = np.flatnonzero(np.diff(period)) + 1
    starts = [0, *edges.tolist()]
    ends = [*edges.tolist(), len(period)]
    groups = [
        (int(period[start]), start, end)
        for start, end in zip(starts, ends, strict=True)
        if start < end and period[start] in {FIRST_MIDDLE, SECOND_MIDDLE}
    ]
    if len(groups) % 2:
        raise NotRepeatedError("something happens in one of its middle blocks alone")
    return [_adjacent(*two) for two in zip(groups[::2], groups[1::2], strict=True)]


def _adjacent(one: Sequence[int], other: Sequence[int]) -> MiddleSpans:
    (period, start, end), (_, next_start, next_end) = one, other
    if end != next_start or end - start != next_end - next_start:
        raise NotRepeatedError("its middle blocks leave different numbers of events")
    return MiddleSpans(start, end, end - start, rising=period == FIRST_MIDDLE)
