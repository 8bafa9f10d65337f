"""Which period of a run each event and op of a twin's trace belongs to.

In forward and backward the passes of blocks tell. Elsewhere, in set-up and optimizer
and where a phase frees what it made, the layer of what is made or freed does: sweeps
over all layers show as items of period 2 beside items of period 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.columnar_trace import Ints

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from budgetfit.tracing.depth_extrapolation.columnar_trace import FlatTrace

FIRST_MIDDLE, SECOND_MIDDLE = 2, 3  # of a twin's four periods, counted from 1
PERIODS = 4


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Where a run's periods lie among the layers and blocks of the whole model.

    Attributes:
        blocks: Indices of each period's blocks.
        layers: For each period (row) and each path within a period (column), the
            layer; -1 where a period has no such module.
        period_of_layer: The period of each layer, counted from 0; -1 elsewhere. Its
            last entry, for layer -1, is -1.
        path_of_layer: The column of ``layers`` for each layer.
    """

    blocks: tuple[tuple[int, ...], ...]
    layers: Ints
    period_of_layer: Ints
    path_of_layer: Ints

    @property
    def kept(self) -> tuple[int, int, int, int]:
        """The periods that the twin has, counted from 0."""
        total = len(self.blocks)
        return 0, 1, total - 2, total - 1

    def units(self) -> Ints:
        """Return for each layer which of a twin's periods it is in, from 1; 0: none."""
        number = np.zeros(len(self.blocks) + 1, np.int64)
        number[list(self.kept)] = np.arange(1, PERIODS + 1)
        return number[self.period_of_layer]

    def unit_of_block(self) -> dict[int, int]:
        """Return which of a twin's periods each block is in."""
        return {
            block: unit + 1
            for unit, period in enumerate(self.kept)
            for block in self.blocks[period]
        }

    def twin_period(self, unit: int) -> tuple[int, ...]:
        """Return the blocks of one of the twin's periods, counted from 1."""
        return self.blocks[self.kept[unit - 1]]

    def longer(self, extra: int) -> Ints:
        """Return the periods, from 0, of a twin with ``extra`` more; its own from 1."""
        return np.array([-1, 0, 1, *range(2, 2 + extra), *self.kept[2:]], np.int64)


@dataclass(frozen=True, slots=True)
class Items:
    """Events and ops of a trace merged into one row, in order.

    Attributes:
        is_op: Whether an item is an op.
        index: Its number among the events or the ops.
        of_event, of_op: Positions of events and ops in the row.
        anchor: The period that each belongs to, 1 to 4; 0 for none.
        storage: The storage of each event; -1 for ops.
        op_event: The number of events before each op.
    """

    is_op: NDArray[np.bool_]
    index: Ints
    of_event: Ints
    of_op: Ints
    anchor: Ints
    storage: Ints
    op_event: Ints

    def after(self, event: int) -> int:
        """Return the position in the row of what follows the first ``event`` events."""
        return event + int(np.searchsorted(self.op_event, event, side="right"))


class Pair(NamedTuple):
    """Neighbouring stretches of the row, of one middle period and of the other."""

    first: int
    second: int
    length: int
    rising: bool


def items_of(flat: FlatTrace, layout: RunLayout) -> Items:
    """Merge events and ops and say which period each belongs to.

    Raises:
        NotRepeatedError: If the passes of the run's blocks are in no plain order.
    """
    events, op_event = flat.events, flat.ops["event"]
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
    anchor = np.zeros(total, np.int64)
    items = Items(is_op, index, of_event, of_op, anchor, storage, op_event)
    units = layout.units()
    by_owner = units[flat.storages["owner"]]
    by_layer = units[flat.storages["layer"]]
    label = np.where(by_owner > 0, by_owner, by_layer)
    anchor[of_event] = label[np.abs(events) - 1]
    owned = units[flat.ops["owner"]]
    anchor[of_op] = np.where(owned > 0, owned, units[flat.ops["layer"]])
    stretched = np.zeros(total, bool)
    for start, end, unit in _stretches(flat, layout, items):
        inside = np.arange(start, end)
        # An op of the optimizer may follow at once, with no event between.
        inside = inside[~(is_op[inside] & (_owners(flat, items)[inside] >= 0))]
        anchor[inside], stretched[inside] = unit, True
    home = np.zeros(len(flat.storages["fixed"]), np.int64)
    births = of_event[events > 0]
    home[storage[births]] = anchor[births]
    lost = ~stretched & ~is_op & (anchor == 0)
    anchor[lost] = home[storage[lost]]
    frees = np.zeros(total, bool)
    frees[of_event[events < 0]] = True
    _place_late_frees(anchor, frees, ~stretched)
    return items


def _place_late_frees(
    anchor: Ints, frees: NDArray[np.bool_], outside: NDArray[np.bool_]
) -> None:
    """Let what is freed amid one period's work belong to that, in place.

    An optimizer's loop lets go of one parameter's tensors while it is at the next.
    """
    working = np.flatnonzero(~frees)
    late = np.flatnonzero(frees & outside)
    after = np.searchsorted(working, late)
    inner = (after > 0) & (after < len(working))
    late, after = late[inner], after[inner]
    before, behind = anchor[working[after - 1]], anchor[working[after]]
    amid = (before == behind) & (before > 0)
    anchor[late[amid]] = before[amid]


def _frees(flat: FlatTrace, items: Items, position: int) -> bool:
    return bool(not items.is_op[position] and flat.events[items.index[position]] < 0)


def _owners(flat: FlatTrace, items: Items) -> Ints:
    owners = np.full(len(items.is_op), -1, np.int64)
    owners[items.of_op] = flat.ops["owner"]
    return owners


def _stretches(
    flat: FlatTrace, layout: RunLayout, items: Items
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, period) of forwards and backwards, as positions in the row."""
    unit_of = layout.unit_of_block()
    for phase in flat.phases:
        rows = [
            row
            for row in flat.passes
            if (row.direction, row.step, row.micro_step)
            == (phase.name, phase.step, phase.micro_step)
        ]
        found = {unit_of[row.block] for row in rows if row.block in unit_of}
        if not found:
            continue
        if found != set(range(1, PERIODS + 1)):
            raise NotRepeatedError("some of its blocks have no pass of their own")
        starts = [
            min(row.start for row in rows if unit_of.get(row.block) == unit)
            for unit in range(1, PERIODS + 1)
        ]
        rising = phase.name == "forward"
        order = range(PERIODS)[:: 1 if rising else -1]
        last = order[-1] + 1
        end = max(row.end for row in rows if unit_of.get(row.block) == last)
        edges = [starts[n] for n in order] + [end]
        if edges != sorted(edges):
            raise NotRepeatedError("its blocks run in no plain order")
        for row in rows:
            if row.block not in unit_of and edges[0] <= row.start < end:
                raise NotRepeatedError("other blocks run between its blocks")
        places = [items.after(edge) for edge in edges]
        # What the last one frees once its pass is over is its own, as with the others.
        stop = items.after(phase.end)
        while places[-1] < stop and _frees(flat, items, places[-1]):
            places[-1] += 1
        for n, start, stop in zip(order, places, places[1:], strict=False):
            yield start, stop, n + 1


def pairs_of(items: Items) -> list[Pair]:
    """Return where items of one middle period stand beside items of the other.

    Raises:
        NotRepeatedError: If one stands alone.
    """
    anchor = items.anchor
    edges = np.flatnonzero(np.diff(anchor)) + 1
    starts = [0, *edges.tolist()]
    ends = [*edges.tolist(), len(anchor)]
    groups = [
        (int(anchor[start]), start, end)
        for start, end in zip(starts, ends, strict=True)
        if start < end and anchor[start] in {FIRST_MIDDLE, SECOND_MIDDLE}
    ]
    if len(groups) % 2:
        raise NotRepeatedError("something happens in one of its middle blocks alone")
    return [_pair(*two) for two in zip(groups[::2], groups[1::2], strict=True)]


def _pair(one: Sequence[int], other: Sequence[int]) -> Pair:
    (unit, start, end), (_, next_start, next_end) = one, other
    if end != next_start or end - start != next_end - next_start:
        raise NotRepeatedError("its middle blocks leave different numbers of events")
    return Pair(start, end, end - start, rising=unit == FIRST_MIDDLE)
