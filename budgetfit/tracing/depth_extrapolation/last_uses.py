"""Frees in one middle period of what was made outside the run.

What all blocks of one kind use, such as a mask, is freed by the last of them. If the
edges have no block of that kind, a middle period has the last one, also in the full
model: the other middle period and the copies have no such event.
"""

from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from budgetfit.core.step_trace import BlockPass, Phase, StepTrace
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.owned_trace import IntArray, OwnedTrace
from budgetfit.tracing.depth_extrapolation.period_labels import Timeline
from budgetfit.tracing.depth_extrapolation.run_layout import FIRST_MIDDLE, SECOND_MIDDLE

_Span = TypeVar("_Span", Phase, BlockPass)


class LastUses(NamedTuple):
    """Such frees, in order: their events, items of the timeline, and periods."""

    events: IntArray
    items: IntArray
    periods: IntArray

    def places(self, without: Timeline, own: IntArray) -> IntArray:
        """Return the items of an extrapolated timeline before which they come.

        ``without``: the original timeline without them; ``own``: where its items are on
        the extrapolated one.
        """
        before = self.items - np.arange(len(self.items)) - 1
        # Copies come between the periods: stay beside an item of the own one.
        follows = without.period[before] == self.periods
        return np.where(follows, own[before] + 1, own[(before + 1) % len(own)])


def frees_after_last_use(trace: StepTrace, timeline: Timeline) -> LastUses:
    """Return the frees in a middle period of what no period made.

    Raises:
        NotRepeatedError: If both middle periods have some.
    """
    made_in = np.zeros(len(trace.layer), np.int64)
    allocations = timeline.of_event[trace.events > 0]
    made_in[timeline.storage[allocations]] = timeline.period[allocations]
    period = timeline.period[timeline.of_event]
    middle = (period == FIRST_MIDDLE) | (period == SECOND_MIDDLE)
    outside = made_in[np.abs(trace.events) - 1] == 0
    events = np.flatnonzero((trace.events < 0) & middle & outside)
    if len(np.unique(period[events])) > 1:
        raise NotRepeatedError("its middle blocks free what was made outside")
    return LastUses(events, timeline.of_event[events], period[events])


def without_events(owned: OwnedTrace, events: IntArray) -> OwnedTrace:
    """Return the trace without some of its events."""
    trace = owned.trace

    def moved(span: _Span) -> _Span:
        start, end = span.start, span.end
        earlier = np.searchsorted(events, (start, end)).tolist()
        return span._replace(start=start - earlier[0], end=end - earlier[1])

    op_event = trace.ops.event - np.searchsorted(events, trace.ops.event)
    return owned._replace(
        trace=replace(
            trace,
            events=np.delete(trace.events, events),
            phases=tuple(map(moved, trace.phases)),
            passes=tuple(map(moved, trace.passes)),
            ops=replace(trace.ops, event=op_event),
        )
    )
