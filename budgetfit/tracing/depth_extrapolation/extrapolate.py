"""From the trace of a shortened twin to that of the whole model (tracing T9).

Between the two middle periods of a run, which must do the same (``middle_match``), go
as many copies as were left out. Nothing is assumed about what the first and the last
period do; that what lies outside the periods does not depend on their number is for a
second twin, one period longer, to show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.extrapolate_passes import (
    Places,
    repeated_blocks,
    repeated_passes,
)
from budgetfit.tracing.depth_extrapolation.period_labels import (
    FIRST_MIDDLE,
    SECOND_MIDDLE,
    items_of,
    pairs_of,
)
from budgetfit.tracing.depth_extrapolation.period_matching import match_middle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from budgetfit.tracing.depth_extrapolation.columnar_trace import FlatTrace, Ints
    from budgetfit.tracing.depth_extrapolation.period_labels import (
        Items,
        Pair,
        RunLayout,
    )
    from budgetfit.tracing.depth_extrapolation.period_matching import Match, Shifted


def repeat_blocks(flat: FlatTrace, layout: RunLayout, extra: int) -> FlatTrace:
    """Return the trace with ``extra`` more periods of one run.

    Raises:
        NotRepeatedError: If the middle of the run does not repeat; what differs is
            named.
    """
    items = items_of(flat, layout)
    pairs = pairs_of(items)
    if not pairs:
        raise NotRepeatedError("its middle blocks leave no events")
    match = match_middle(flat, layout, items, pairs, extra)
    row = _longer_row(items, pairs, match, extra)
    events = _events(flat, items, match, row)
    order = np.abs(events[events > 0]) - 1  # storages are numbered as they are born
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    events = np.sign(events) * (number[np.abs(events) - 1] + 1)
    _check(events)
    is_op = items.is_op[row.item]
    counts = np.concatenate([[0], np.cumsum(~is_op)])
    periods = layout.longer(extra)
    ops = row.of(is_op)
    shares, moved = _shares(flat, layout, items, ops, extra)
    places = Places(items, tuple(pairs), extra, counts, match, number)
    return flat.replaced(
        storages=_storages(flat, layout.layers, periods, match, order),
        events=events,
        ops=_ops(flat, items, layout.layers, periods, match, ops)
        | {"event": counts[:-1][is_op], "bytes_fixed": moved},
        shares=shares,
        phases=tuple(
            phase._replace(
                start=places.moved(phase.start, starts=True),
                end=places.moved(phase.end, starts=False),
            )
            for phase in flat.phases
        ),
        passes=repeated_passes(flat, layout, places),
        **repeated_blocks(flat, layout, extra),
    )


class _Row(NamedTuple):
    """The items of the longer trace, in order.

    ``item`` is the position in the twin's row that each is or is a copy of; ``copy``
    counts from 1, 0 for the twin's own; ``pair`` is the position in ``Match.three`` of
    what was copied.
    """

    item: Ints
    copy: Ints
    pair: Ints

    def of(self, chosen: NDArray[np.bool_]) -> _Row:
        """Return some of the items."""
        return _Row(self.item[chosen], self.copy[chosen], self.pair[chosen])


def _longer_row(items: Items, pairs: Sequence[Pair], match: Match, extra: int) -> _Row:
    """Put the copies between the middle periods, wherever these stand side by side."""
    parts: list[_Row] = []

    def own(start: int, end: int) -> _Row:
        zeros = np.zeros(end - start, np.int64)
        return _Row(np.arange(start, end), zeros, zeros - 1)

    done = offset = 0
    numbers = np.arange(1, extra + 1)
    for pair in pairs:
        parts.append(own(done, pair.second))
        place = np.tile(offset + np.arange(pair.length), extra)
        order = numbers if pair.rising else numbers[::-1]
        parts.append(_Row(match.three[place], np.repeat(order, pair.length), place))
        done, offset = pair.second, offset + pair.length
    parts.append(own(done, len(items.is_op)))
    return _Row(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _events(flat: FlatTrace, items: Items, match: Match, row: _Row) -> Ints:
    """Return the longer trace's events, storages not yet numbered anew."""
    row = row.of(~items.is_op[row.item])
    storage = match.seen_from(items.storage[row.item], items.anchor[row.item])
    shift, slot = np.zeros((2, len(match.three)), np.int64)
    slot[match.born] = np.arange(match.table.shape[1])
    shift[match.dies], slot[match.dies] = match.freed.shift, match.freed.column
    new = row.copy > 0
    place = row.pair[new]
    storage[new] = match.in_copies(row.copy[new], shift[place], slot[place])
    return np.sign(flat.events)[items.index[row.item]] * (storage + 1)


def _storages(
    flat: FlatTrace, layers: Ints, periods: Ints, match: Match, order: Ints
) -> dict[str, Ints]:
    """Return the facts of all storages, in their new order.

    Raises:
        NotRepeatedError: If some are never born, or twice.
    """
    extra, width = len(match.table) - 2, match.table.shape[1]
    slot = np.tile(np.arange(width), extra)
    copy = np.repeat(np.arange(1, extra + 1), width)
    result = {}
    for name, column in flat.storages.items():
        if name in {"layer", "owner"}:
            shifted = match.layers if name == "layer" else match.owners
            new = _layers(layers, periods, shifted, slot, copy)
        else:
            new = column[match.table[-1]][slot]
        result[name] = np.concatenate([column, new])
    if not np.array_equal(np.sort(order), np.arange(len(result["fixed"]))):
        raise NotRepeatedError("its storages are not born once each")
    return {name: column[order] for name, column in result.items()}


def _layers(
    layers: Ints, periods: Ints, shifted: Shifted, place: Ints, copy: Ints
) -> Ints:
    """Return the layers in copies that correspond to those of the middle periods."""
    column = shifted.column[place]
    # Where the column is -1 the period means nothing and may lie outside.
    row = np.clip(FIRST_MIDDLE + copy + shifted.shift[place], 0, len(periods) - 1)
    return np.where(column < 0, shifted.fixed[place], layers[periods[row], column])


def _ops(  # noqa: PLR0913, PLR0917 - what is known of both traces
    flat: FlatTrace,
    items: Items,
    layers: Ints,
    periods: Ints,
    match: Match,
    row: _Row,
) -> dict[str, NDArray[Any]]:
    """Return the longer trace's ops, but for where they are and what they share."""
    ops = {name: column[items.index[row.item]] for name, column in flat.ops.items()}
    new = row.copy > 0
    among_ops = np.cumsum(items.is_op[match.three]) - 1
    place = among_ops[row.pair[new]]
    for name, shifted in (("layer", match.op_layers), ("owner", match.op_owners)):
        ops[name][new] = _layers(layers, periods, shifted, place, row.copy[new])
    return ops


def _shares(
    flat: FlatTrace, layout: RunLayout, items: Items, row: _Row, extra: int
) -> tuple[Ints, NDArray[np.float64]]:
    """Let ops on lists of all layers' tensors move those of the copies too.

    Raises:
        NotRepeatedError: If they move more of one middle period than of the other.
    """
    op, layer, size = flat.shares.T
    unit = layout.units()[layer]
    two, three = (
        np.bincount(
            op[unit == n], weights=size[unit == n], minlength=len(flat.ops["event"])
        )
        for n in (FIRST_MIDDLE, SECOND_MIDDLE)
    )
    if not np.array_equal(two, three) or flat.ops["bytes_per_sample"][two > 0].any():
        raise NotRepeatedError("an op on all layers treats its middle blocks apart")
    moved = flat.ops["bytes_fixed"][items.index[row.item]]
    own = row.copy == 0
    moved[own] += extra * two[items.index[row.item[own]]]
    number = np.full(len(two), -1, np.int64)
    number[items.index[row.item[own]]] = np.flatnonzero(own)
    middle = np.flatnonzero(unit == FIRST_MIDDLE)
    path, periods = layout.path_of_layer[layer[middle]], layout.longer(extra)
    copies = [
        np.stack(
            [op[middle], layout.layers[periods[FIRST_MIDDLE + n], path], size[middle]]
        )
        for n in range(1, extra + 1)
    ]
    shares = np.concatenate([flat.shares.T, *copies], axis=1)
    shares[0] = number[shares[0]]
    return shares.T, moved


def _check(events: Ints) -> None:
    """Refuse events that free a storage twice or before it is born."""
    position = np.arange(len(events))
    birth = np.full(len(events) + 1, len(events))
    birth[events[events > 0]] = position[events > 0]
    dead = -events[events < 0]
    if len(np.unique(dead)) != len(dead) or (birth[dead] > position[events < 0]).any():
        raise NotRepeatedError("something would be freed twice")
