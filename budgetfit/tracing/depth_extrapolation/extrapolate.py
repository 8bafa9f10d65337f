"""Extrapolate the trace of a shortened model to the full number of layers.

Copies of the middle periods are inserted between them, as many as were left out; the
two must match (``period_matching``). Nothing is assumed about the first and the last
period. That nothing outside the periods depends on their number is validated with the
trace of a model one period deeper.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.extrapolate_passes import (
    EventPositions,
    extrapolate_blocks,
    extrapolate_passes,
)
from budgetfit.tracing.depth_extrapolation.period_labels import (
    label_timeline,
    middle_spans,
)
from budgetfit.tracing.depth_extrapolation.period_matching import match_middle_periods
from budgetfit.tracing.depth_extrapolation.run_layout import FIRST_MIDDLE, SECOND_MIDDLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from budgetfit.tracing.depth_extrapolation.columnar_trace import (
        ColumnarTrace,
        IntArray,
    )
    from budgetfit.tracing.depth_extrapolation.period_labels import (
        MiddleSpans,
        Timeline,
    )
    from budgetfit.tracing.depth_extrapolation.period_matching import (
        PeriodMatch,
        PeriodReference,
    )
    from budgetfit.tracing.depth_extrapolation.run_layout import RunLayout


def extrapolate_depth(
    trace: ColumnarTrace, layout: RunLayout, extra: int
) -> ColumnarTrace:
    """Return the trace with ``extra`` more periods of one run.

    Raises:
        NotRepeatedError: If the middle of the run does not repeat; the message names
            what differs.
    """
    timeline = label_timeline(trace, layout)
    pairs = middle_spans(timeline)
    if not pairs:
        raise NotRepeatedError("its middle blocks leave no events")
    match = match_middle_periods(trace, layout, timeline, pairs, extra)
    items = _insert_copies(timeline, pairs, match, extra)
    events = _events(trace, timeline, match, items)
    order = np.abs(events[events > 0]) - 1  # storages are numbered in allocation order
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    events = np.sign(events) * (number[np.abs(events) - 1] + 1)
    _check(events)
    is_op = timeline.is_op[items.item]
    counts = np.concatenate([[0], np.cumsum(~is_op)])
    periods = layout.extended(extra)
    ops = items.of(is_op)
    shares, moved = _shares(trace, layout, timeline, ops, extra)
    positions = EventPositions(timeline, tuple(pairs), extra, counts, match, number)
    return replace(
        trace,
        storages=_storages(trace, layout.layers, periods, match, order),
        events=events,
        ops=_ops(trace, timeline, layout.layers, periods, match, ops)
        | {"event": counts[:-1][is_op], "bytes_fixed": moved},
        shares=shares,
        phases=tuple(
            phase._replace(
                start=positions.moved(phase.start, starts=True),
                end=positions.moved(phase.end, starts=False),
            )
            for phase in trace.phases
        ),
        passes=extrapolate_passes(trace, layout, positions),
        **extrapolate_blocks(trace, layout, extra),
    )


class _Items(NamedTuple):
    """The items of the extrapolated timeline, in order.

    ``item`` is the original's position on the timeline; ``copy`` counts from 1, 0 for
    the original itself; ``pair`` is the position in ``PeriodMatch.three`` of what was
    copied.
    """

    item: IntArray
    copy: IntArray
    pair: IntArray

    def of(self, chosen: NDArray[np.bool_]) -> _Items:
        """Return a selection of the items."""
        return _Items(self.item[chosen], self.copy[chosen], self.pair[chosen])


def _insert_copies(
    timeline: Timeline, pairs: Sequence[MiddleSpans], match: PeriodMatch, extra: int
) -> _Items:
    """Insert the copies between the adjacent spans of the middle periods."""
    parts: list[_Items] = []

    def own(start: int, end: int) -> _Items:
        zeros = np.zeros(end - start, np.int64)
        return _Items(np.arange(start, end), zeros, zeros - 1)

    done = offset = 0
    numbers = np.arange(1, extra + 1)
    for pair in pairs:
        parts.append(own(done, pair.second))
        place = np.tile(offset + np.arange(pair.length), extra)
        order = numbers if pair.rising else numbers[::-1]
        parts.append(_Items(match.three[place], np.repeat(order, pair.length), place))
        done, offset = pair.second, offset + pair.length
    parts.append(own(done, len(timeline.is_op)))
    return _Items(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _events(
    trace: ColumnarTrace, timeline: Timeline, match: PeriodMatch, items: _Items
) -> IntArray:
    """Return the extrapolated events, before storages are renumbered."""
    items = items.of(~timeline.is_op[items.item])
    storage = match.resolve(timeline.storage[items.item], timeline.period[items.item])
    shift, slot = np.zeros((2, len(match.three)), np.int64)
    slot[match.allocates] = np.arange(match.table.shape[1])
    shift[match.frees], slot[match.frees] = match.freed.shift, match.freed.column
    new = items.copy > 0
    place = items.pair[new]
    storage[new] = match.storages_in_copies(items.copy[new], shift[place], slot[place])
    return np.sign(trace.events)[timeline.index[items.item]] * (storage + 1)


def _storages(
    trace: ColumnarTrace,
    layers: IntArray,
    periods: IntArray,
    match: PeriodMatch,
    order: IntArray,
) -> dict[str, IntArray]:
    """Return the columns of all storages, in their new order.

    Raises:
        NotRepeatedError: If some are never allocated, or twice.
    """
    extra, width = len(match.table) - 2, match.table.shape[1]
    slot = np.tile(np.arange(width), extra)
    copy = np.repeat(np.arange(1, extra + 1), width)
    result = {}
    for name, column in trace.storages.items():
        if name in {"layer", "owner"}:
            reference = match.layers if name == "layer" else match.owners
            new = _layers(layers, periods, reference, slot, copy)
        else:
            new = column[match.table[-1]][slot]
        result[name] = np.concatenate([column, new])
    if not np.array_equal(np.sort(order), np.arange(len(result["fixed"]))):
        raise NotRepeatedError("its storages are not born once each")
    return {name: column[order] for name, column in result.items()}


def _layers(
    layers: IntArray,
    periods: IntArray,
    reference: PeriodReference,
    place: IntArray,
    copy: IntArray,
) -> IntArray:
    """Return the layers that copies refer to, from those of the middle periods."""
    column = reference.column[place]
    # Where the column is -1 the period is meaningless and may be out of range.
    row = np.clip(FIRST_MIDDLE + copy + reference.shift[place], 0, len(periods) - 1)
    return np.where(column < 0, reference.fixed[place], layers[periods[row], column])


def _ops(  # noqa: PLR0913, PLR0917 - both traces
    trace: ColumnarTrace,
    timeline: Timeline,
    layers: IntArray,
    periods: IntArray,
    match: PeriodMatch,
    items: _Items,
) -> dict[str, NDArray[Any]]:
    """Return the extrapolated columns of ops, except positions and shared bytes."""
    ops = {
        name: column[timeline.index[items.item]] for name, column in trace.ops.items()
    }
    new = items.copy > 0
    among_ops = np.cumsum(timeline.is_op[match.three]) - 1
    place = among_ops[items.pair[new]]
    for name, reference in (("layer", match.op_layers), ("owner", match.op_owners)):
        ops[name][new] = _layers(layers, periods, reference, place, items.copy[new])
    return ops


def _shares(
    trace: ColumnarTrace,
    layout: RunLayout,
    timeline: Timeline,
    items: _Items,
    extra: int,
) -> tuple[IntArray, NDArray[np.float64]]:
    """Extend ops on tensor lists of all layers (``_foreach``) to the copies.

    Raises:
        NotRepeatedError: If they move more of one middle period than of the other.
    """
    op, layer, size = trace.shares.T
    period = layout.kept_period_of_layers()[layer]
    two, three = (
        np.bincount(
            op[period == n],
            weights=size[period == n],
            minlength=len(trace.ops["event"]),
        )
        for n in (FIRST_MIDDLE, SECOND_MIDDLE)
    )
    if not np.array_equal(two, three) or trace.ops["bytes_per_sample"][two > 0].any():
        raise NotRepeatedError("an op on all layers treats its middle blocks apart")
    moved = trace.ops["bytes_fixed"][timeline.index[items.item]]
    own = items.copy == 0
    moved[own] += extra * two[timeline.index[items.item[own]]]
    number = np.full(len(two), -1, np.int64)
    number[timeline.index[items.item[own]]] = np.flatnonzero(own)
    middle = np.flatnonzero(period == FIRST_MIDDLE)
    path, periods = layout.path_of_layer[layer[middle]], layout.extended(extra)
    copies = [
        np.stack(
            [op[middle], layout.layers[periods[FIRST_MIDDLE + n], path], size[middle]]
        )
        for n in range(1, extra + 1)
    ]
    shares = np.concatenate([trace.shares.T, *copies], axis=1)
    shares[0] = number[shares[0]]
    return shares.T, moved


def _check(events: IntArray) -> None:
    """Check that every storage is freed at most once, after its allocation."""
    position = np.arange(len(events))
    allocation = np.full(len(events) + 1, len(events))
    allocation[events[events > 0]] = position[events > 0]
    freed = -events[events < 0]
    if (
        len(np.unique(freed)) != len(freed)
        or (allocation[freed] > position[events < 0]).any()
    ):
        raise NotRepeatedError("something would be freed twice")
