"""What corresponds in the two middle periods of a twin's run (tracing T9).

They must leave the same stretches: the same events in the same order, on storages that
correspond, of the same sizes, layers and kinds, and the same ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.columnar_trace import Ints
from budgetfit.tracing.depth_extrapolation.period_labels import (
    FIRST_MIDDLE,
    SECOND_MIDDLE,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.tracing.depth_extrapolation.columnar_trace import FlatTrace
    from budgetfit.tracing.depth_extrapolation.period_labels import (
        Items,
        Pair,
        RunLayout,
    )

_STORAGE_FACTS = ("fixed", "slope", "category", "scratch", "unverified")
_OP_FACTS = (
    "rate",
    "name",
    "flops_fixed",
    "flops_per_sample",
    "bytes_fixed",
    "bytes_per_sample",
)


class Shifted(NamedTuple):
    """Where things of a period lie: ``shift`` periods away, at ``column`` there.

    For storages the column is a slot of ``Match.table``, for layers one of
    ``RunLayout.layers``. Where it is -1, ``fixed`` is meant in every copy.
    """

    shift: Ints
    column: Ints
    fixed: Ints


@dataclass(frozen=True, slots=True)
class Match:
    """The middle periods side by side, and the storages of the copies between them.

    Attributes:
        two, three: Positions of the items of both periods, in pairs.
        born, dies: Which of the pairs are births and frees; the others are ops.
        home: The period that each storage is born in.
        slots: For each storage of a middle period its column in ``table``; else -1.
        table: The storages that correspond, one row for each period from the first
            middle one to the second; those of the copies are new.
        layers, owners: Of each column of ``table``.
        op_layers, op_owners: Of each pair of ops.
        freed: The storages that frees name.
    """

    two: Ints
    three: Ints
    born: NDArray[np.bool_]
    dies: NDArray[np.bool_]
    home: Ints
    slots: Ints
    table: Ints
    layers: Shifted
    owners: Shifted
    op_layers: Shifted
    op_owners: Shifted
    freed: Shifted

    def seen_from(self, storage: Ints, anchor: Ints) -> Ints:
        """Return which storages periods mean, now that copies lie in the middle.

        What the first middle period was to the second, the last copy is.

        Raises:
            NotRepeatedError: If something outside the run names one block's storage.
        """
        slot, home = self.slots[storage], self.home[storage]
        middle = slot >= 0
        if (middle & (anchor == 0)).any():
            raise NotRepeatedError("something outside frees what one block made")
        storage = storage.copy()
        up = middle & (anchor <= FIRST_MIDDLE) & (home == SECOND_MIDDLE)
        down = middle & (anchor >= SECOND_MIDDLE) & (home == FIRST_MIDDLE)
        storage[up] = self.table[1, slot[up]]
        storage[down] = self.table[-2, slot[down]]
        return storage

    def in_copies(self, copy: Ints, shift: Ints, slot: Ints) -> Ints:
        """Return the storages that copies, counted from 1, mean.

        Raises:
            NotRepeatedError: If they lie beyond the middle periods.
        """
        row = copy + shift
        if ((row < 0) | (row >= len(self.table))).any():
            raise NotRepeatedError("its middle blocks use what was made far away")
        return self.table[row, slot]


def match_middle(
    flat: FlatTrace, layout: RunLayout, items: Items, pairs: Sequence[Pair], extra: int
) -> Match:
    """Compare the two middle periods item by item, and pair what corresponds.

    Raises:
        NotRepeatedError: If they differ; the first difference is named.
    """
    two, three = _positions(pairs)
    _same("the order of events and ops", items.is_op[two], items.is_op[three])
    ops = items.is_op[three]
    op_two, op_three = items.index[two[ops]], items.index[three[ops]]
    for name in _OP_FACTS:
        _same(f"ops' {name}", flat.ops[name][op_two], flat.ops[name][op_three])
    births = np.zeros(len(items.is_op), bool)
    births[items.of_event[flat.events > 0]] = True
    _same("allocations and frees", births[two], births[three])
    born, dies = births[three], ~births[three] & ~ops
    made_two, made_three = items.storage[two[born]], items.storage[three[born]]
    for name in _STORAGE_FACTS:
        column = flat.storages[name]
        _same(f"storages' {name}", column[made_two], column[made_three])
    count = len(flat.storages["fixed"])
    slots, home = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    slots[made_two] = slots[made_three] = np.arange(len(made_two))
    home[items.storage[births]] = items.anchor[births]
    copies = count + np.arange(extra * len(made_two)).reshape(extra, -1)
    layer, owner = flat.storages["layer"], flat.storages["owner"]
    op_layer, op_owner = flat.ops["layer"], flat.ops["owner"]
    return Match(
        two=two,
        three=three,
        born=born,
        dies=dies,
        home=home,
        slots=slots,
        table=np.vstack([made_two, copies, made_three]),
        layers=_shifted(layout, layer[made_two], layer[made_three]),
        owners=_shifted(layout, owner[made_two], owner[made_three]),
        op_layers=_shifted(layout, op_layer[op_two], op_layer[op_three]),
        op_owners=_shifted(layout, op_owner[op_two], op_owner[op_three]),
        freed=_freed(
            flat, slots, home, items.storage[two[dies]], items.storage[three[dies]]
        ),
    )


def _positions(pairs: Sequence[Pair]) -> tuple[Ints, Ints]:
    """Return the positions of the first middle period's items, and of the other's."""
    two, three = [], []
    for pair in pairs:
        first, second = (
            np.arange(start, start + pair.length) for start in (pair.first, pair.second)
        )
        two.append(first if pair.rising else second)
        three.append(second if pair.rising else first)
    return np.concatenate(two), np.concatenate(three)


def _freed(flat: FlatTrace, slots: Ints, home: Ints, two: Ints, three: Ints) -> Shifted:
    """Find for what is freed which period's it is, counted from the one that frees.

    One of the two may be of the first or the last period, which need not correspond;
    the other then tells.
    """
    in_two, in_three = slots[two] >= 0, slots[three] >= 0
    if not (in_two | in_three).all():
        raise NotRepeatedError("its middle blocks free what was made far away")
    _same("whose storages they free", home[two] + 1, home[three])
    both = in_two & in_three
    _same("which storages they free", slots[two[both]], slots[three[both]])
    for name in ("fixed", "slope"):
        column = flat.storages[name]
        _same(f"{name} bytes of what they free", column[two], column[three])
    return Shifted(
        home[three] - SECOND_MIDDLE,
        np.where(in_three, slots[three], slots[two]),
        three,
    )


def _shifted(layout: RunLayout, two: Ints, three: Ints) -> Shifted:
    """Say for layers that both middle periods name which period they are in.

    Raises:
        NotRepeatedError: If they do not correspond.
    """
    units, path = layout.units(), layout.path_of_layer
    unit_two, unit_three = units[two], units[three]
    middle = (unit_two == FIRST_MIDDLE) | (unit_two == SECOND_MIDDLE)
    fixed = (two == three) & ~middle
    inside = (unit_two > 0) & (unit_three == unit_two + 1) & (path[two] == path[three])
    if not (fixed | inside).all():
        raise NotRepeatedError("its middle blocks work for different layers")
    return Shifted(unit_three - SECOND_MIDDLE, np.where(fixed, -1, path[three]), three)


def _same(what: str, one: NDArray[Any], other: NDArray[Any]) -> None:
    if not np.array_equal(one, other):
        raise NotRepeatedError(f"its middle blocks differ in {what}")
