"""Extrapolate the trace of a shortened model to the full number of layers.

Copies of the middle periods are inserted between them, as many as were left out; the
two must match (``period_matching``). Nothing is assumed about the first and the last
period. That nothing outside the periods depends on their number is validated with the
trace of a model one period deeper (``validate``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import OpTable, Phase, StepTrace, UnverifiedOp
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.extrapolate_passes import (
    EventPositions,
    extrapolate_blocks,
    extrapolate_passes,
)
from budgetfit.tracing.depth_extrapolation.last_uses import (
    frees_after_last_use,
    without_events,
)
from budgetfit.tracing.depth_extrapolation.owned_trace import IntArray, OwnedTrace
from budgetfit.tracing.depth_extrapolation.period_labels import (
    MiddleSpans,
    Timeline,
    label_timeline,
    middle_spans,
)
from budgetfit.tracing.depth_extrapolation.period_matching import (
    PeriodMatch,
    PeriodReference,
    match_middle_periods,
    unverified_column,
)
from budgetfit.tracing.depth_extrapolation.run_layout import (
    FIRST_MIDDLE,
    SECOND_MIDDLE,
    RunLayout,
)


def extrapolate(
    owned: OwnedTrace, layouts: Sequence[RunLayout], extra: Sequence[int]
) -> OwnedTrace:
    """Return the trace with so many more periods of each run.

    Raises:
        NotRepeatedError: If the middle of a run does not repeat; the message names what
            differs.
    """
    for layout, count in zip(layouts, extra, strict=True):
        owned = _extrapolate_run(owned, layout, count)
    return owned


def _extrapolate_run(owned: OwnedTrace, layout: RunLayout, extra: int) -> OwnedTrace:
    """Return the trace with ``extra`` more periods of one run."""
    whole = owned.trace
    timeline = label_timeline(owned, layout)
    last_uses = frees_after_last_use(whole, timeline)
    if last_uses.events.size:
        owned = without_events(owned, last_uses.events)
        timeline = label_timeline(owned, layout)
    trace = owned.trace
    pairs = middle_spans(timeline)
    if not pairs:
        raise NotRepeatedError("its middle blocks leave no events")
    match = match_middle_periods(owned, layout, timeline, pairs, extra)
    items = _insert_copies(timeline, pairs, match, extra)
    events = _events(trace, timeline, match, items)
    order = np.abs(events[events > 0]) - 1  # storages are numbered in allocation order
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    events = np.sign(events) * (number[np.abs(events) - 1] + 1)
    _check(events)
    counts = np.concatenate([[0], np.cumsum(~timeline.is_op[items.item])])
    places = last_uses.places(timeline, np.flatnonzero(items.copy == 0))
    inserted = counts[places]
    freed = number[np.abs(whole.events[last_uses.events]) - 1]
    positions = EventPositions(
        timeline,
        tuple(pairs),
        extra,
        counts,
        match,
        number,
        removed=last_uses.events,
        inserted=inserted,
    )
    owned = _with_copied_storages(owned, layout, match, order)
    owned = _with_copied_ops(owned, layout, timeline, match, items, extra, places)
    return owned._replace(
        trace=replace(
            owned.trace,
            events=np.insert(events, inserted, -freed - 1).astype(np.int32),
            phases=tuple(_moved(phase, positions) for phase in whole.phases),
            passes=extrapolate_passes(whole, layout, positions),
            **extrapolate_blocks(trace, layout, extra),
        )
    )


def _moved(phase: Phase, positions: EventPositions) -> Phase:
    return phase._replace(
        start=positions.moved(phase.start, starts=True),
        end=positions.moved(phase.end, starts=False),
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
    trace: StepTrace, timeline: Timeline, match: PeriodMatch, items: _Items
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


def _with_copied_storages(
    owned: OwnedTrace, layout: RunLayout, match: PeriodMatch, order: IntArray
) -> OwnedTrace:
    """Return the trace with the columns of all storages, in their new order.

    Raises:
        NotRepeatedError: If some are never allocated, or twice.
    """
    trace = owned.trace
    extra, width = len(match.table) - 2, match.table.shape[1]
    slot = np.tile(np.arange(width), extra)
    copy = np.repeat(np.arange(1, extra + 1), width)
    origin = np.concatenate([np.arange(len(trace.layer)), match.table[-1][slot]])
    if not np.array_equal(np.bincount(order), np.ones(len(origin))):
        raise NotRepeatedError("its storages are not allocated once each")
    origin = origin[order]
    layer, owner = (
        np.concatenate([column, _layers(layout, extra, reference, slot, copy)])[order]
        for column, reference in (
            (trace.layer, match.layers),
            (owned.owner, match.owners),
        )
    )
    unverified = unverified_column(trace)[origin]
    return owned._replace(
        trace=replace(
            trace,
            fixed_bytes=trace.fixed_bytes[origin],
            bytes_per_sample=trace.bytes_per_sample[origin],
            category=trace.category[origin],
            layer=layer.astype(np.int32),
            scratch_index=trace.scratch_index[origin],
            stream=np.trim_zeros(trace.stream_column()[origin], "b"),
            unverified_ops=tuple(
                UnverifiedOp(op.name, tuple(np.flatnonzero(unverified == n).tolist()))
                for n, op in enumerate(trace.unverified_ops)
            ),
        ),
        owner=owner,
        origin=owned.origin[origin],
    )


def _layers(
    layout: RunLayout,
    extra: int,
    reference: PeriodReference,
    place: IntArray,
    copy: IntArray,
) -> IntArray:
    """Return the layers that copies refer to, from those of the middle periods."""
    column, periods = reference.column[place], layout.extended(extra)
    # Where the column is -1 the period is meaningless and may be out of range.
    row = np.clip(FIRST_MIDDLE + copy + reference.shift[place], 0, len(periods) - 1)
    layers = layout.layers[periods[row], column]
    return np.where(column < 0, reference.fixed[place], layers)


def _with_copied_ops(  # noqa: PLR0913, PLR0917 - both traces
    owned: OwnedTrace,
    layout: RunLayout,
    timeline: Timeline,
    match: PeriodMatch,
    items: _Items,
    extra: int,
    inserted: IntArray,
) -> OwnedTrace:
    """Return the trace with the columns of all ops; events are inserted at items."""
    is_op = timeline.is_op[items.item]
    events_before = np.cumsum(~is_op, dtype=np.int64)[is_op]
    events_before += np.searchsorted(inserted, np.flatnonzero(is_op), side="right")
    items = items.of(is_op)
    origin = timeline.index[items.item]
    table = owned.trace.ops
    ops = OpTable(*(getattr(table, each.name)[origin] for each in fields(OpTable)))
    op_owner = owned.op_owner[origin]
    new = items.copy > 0
    among_ops = np.cumsum(timeline.is_op[match.three]) - 1
    place = among_ops[items.pair[new]]
    for column, reference in (
        (ops.layer, match.op_layers),
        (op_owner, match.op_owners),
    ):
        column[new] = _layers(layout, extra, reference, place, items.copy[new])
    shares, moved = _shares(owned, layout, origin, items.copy == 0, extra)
    return owned._replace(
        trace=replace(
            owned.trace, ops=replace(ops, event=events_before, bytes_fixed=moved)
        ),
        op_owner=op_owner,
        shares=shares,
        op_origin=owned.op_origin[origin],
    )


def _shares(
    owned: OwnedTrace,
    layout: RunLayout,
    origin: IntArray,
    own: NDArray[np.bool_],
    extra: int,
) -> tuple[IntArray, NDArray[np.float64]]:
    """Extend ops on tensor lists of all layers (``_foreach``) to the copies.

    ``origin``: the original number of each op; ``own``: whether each is the original
    itself; ``extra``: number of copies.

    Returns:
        The shares, and the bytes that each op moves at batch size 0.

    Raises:
        NotRepeatedError: If they move more of one middle period than of the other.
    """
    ops = owned.trace.ops
    op, layer, size = owned.shares.T
    period = layout.kept_period_of_layers()[layer]
    two, three = (
        np.bincount(op[period == n], size[period == n], len(ops.event))
        for n in (FIRST_MIDDLE, SECOND_MIDDLE)
    )
    if not np.array_equal(two, three) or ops.bytes_per_sample[two > 0].any():
        raise NotRepeatedError("an op on all layers treats its middle blocks apart")
    moved = ops.bytes_fixed[origin]
    moved[own] += extra * two[origin[own]]
    number = np.full(len(two), -1, np.int64)
    number[origin[own]] = np.flatnonzero(own)
    middle = np.flatnonzero(period == FIRST_MIDDLE)
    path, periods = layout.path_of_layer[layer[middle]], layout.extended(extra)
    copies = [
        np.stack(
            [op[middle], layout.layers[periods[FIRST_MIDDLE + n], path], size[middle]]
        )
        for n in range(1, extra + 1)
    ]
    shares = np.concatenate([owned.shares.T, *copies], axis=1)
    shares[0] = number[shares[0]]
    return shares.T, moved


def _check(events: IntArray) -> None:
    """Check that every storage is freed at most once, after its allocation."""
    position = np.arange(len(events))
    allocation = np.full(len(events) + 1, len(events))
    allocation[events[events > 0]] = position[events > 0]
    freed = -events[events < 0]
    if (
        np.bincount(freed).max(initial=0) > 1
        or (allocation[freed] > position[events < 0]).any()
    ):
        raise NotRepeatedError("something would be freed twice")
