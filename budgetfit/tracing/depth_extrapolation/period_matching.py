"""Match the two middle periods of a shortened model's run, item by item.

They must have the same events in the same order, on corresponding storages of equal
sizes, layers and categories, and the same ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import OP_COST_COLUMNS, StepTrace
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.owned_trace import IntArray, OwnedTrace
from budgetfit.tracing.depth_extrapolation.period_labels import MiddleSpans, Timeline
from budgetfit.tracing.depth_extrapolation.run_layout import (
    FIRST_MIDDLE,
    SECOND_MIDDLE,
    RunLayout,
)


class PeriodReference(NamedTuple):
    """References of a period's items: ``shift`` periods away, at ``column`` there.

    For storages the column is a slot of ``PeriodMatch.table``, for layers one of
    ``RunLayout.layers``. Where it is -1, every copy refers to ``fixed``.
    """

    shift: IntArray
    column: IntArray
    fixed: IntArray


@dataclass(frozen=True, slots=True)
class PeriodMatch:
    """The matched items of the middle periods, and the storages of the copies.

    Attributes:
        three: Timeline positions of the second middle period's items.
        allocates, frees: Which of them are allocations and frees; the others are ops.
        allocated_in: The period that allocates each storage.
        slots: For each storage of a middle period its column in ``table``; else -1.
        table: Corresponding storages, one row for each period from the first middle one
            to the second; those of the copies are new.
        layers, owners: Of each column of ``table``.
        op_layers, op_owners: Of each pair of ops.
        freed: The storages that frees refer to.
    """

    three: IntArray
    allocates: NDArray[np.bool_]
    frees: NDArray[np.bool_]
    allocated_in: IntArray
    slots: IntArray
    table: IntArray
    layers: PeriodReference
    owners: PeriodReference
    op_layers: PeriodReference
    op_owners: PeriodReference
    freed: PeriodReference

    def resolve(self, storage: IntArray, period: IntArray) -> IntArray:
        """Return the storages that items of a period refer to, copies inserted.

        To the second middle period the last copy is what the first one was.

        Raises:
            NotRepeatedError: If something outside the run frees one block's storage.
        """
        slot, source = self.slots[storage], self.allocated_in[storage]
        middle = slot >= 0
        if (middle & (period == 0)).any():
            raise NotRepeatedError("something outside frees what one block made")
        storage = storage.copy()
        up = middle & (period <= FIRST_MIDDLE) & (source == SECOND_MIDDLE)
        down = middle & (period >= SECOND_MIDDLE) & (source == FIRST_MIDDLE)
        storage[up] = self.table[1, slot[up]]
        storage[down] = self.table[-2, slot[down]]
        return storage

    def storages_in_copies(
        self, copy: IntArray, shift: IntArray, slot: IntArray
    ) -> IntArray:
        """Return the storages that copies, counted from 1, refer to.

        Raises:
            NotRepeatedError: If these are not of the middle periods.
        """
        row = copy + shift
        if ((row < 0) | (row >= len(self.table))).any():
            raise NotRepeatedError("its middle blocks use what was made far away")
        return self.table[row, slot]


def unverified_column(trace: StepTrace) -> IntArray:
    """Return each storage's index into ``trace.unverified_ops``; -1: verified."""
    column = np.full(len(trace.layer), -1, np.int64)
    for number, op in enumerate(trace.unverified_ops):
        column[list(op.storages)] = number
    return column


def match_middle_periods(
    owned: OwnedTrace,
    layout: RunLayout,
    timeline: Timeline,
    pairs: Sequence[MiddleSpans],
    extra: int,
) -> PeriodMatch:
    """Compare the two middle periods item by item, and match their storages.

    Raises:
        NotRepeatedError: If they differ; the message names the first difference.
    """
    trace = owned.trace
    two, three = _positions(pairs)
    _same("the order of events and ops", timeline.is_op[two], timeline.is_op[three])
    ops = timeline.is_op[three]
    op_two, op_three = timeline.index[two[ops]], timeline.index[three[ops]]
    for name in OP_COST_COLUMNS:
        column = getattr(trace.ops, name)
        _same(f"ops' {name}", column[op_two], column[op_three])
    is_allocation = np.zeros(len(timeline.is_op), bool)
    is_allocation[timeline.of_event[trace.events > 0]] = True
    _same("allocations and frees", is_allocation[two], is_allocation[three])
    allocates, frees = is_allocation[three], ~is_allocation[three] & ~ops
    made_two, made_three = (
        timeline.storage[two[allocates]],
        timeline.storage[three[allocates]],
    )
    for name, column in (
        ("fixed", trace.fixed_bytes),
        ("slope", trace.bytes_per_sample),
        ("category", trace.category),
        ("scratch", trace.scratch_index),
        ("unverified", unverified_column(trace)),
        ("stream", trace.stream_column()),
    ):
        _same(f"storages' {name}", column[made_two], column[made_three])
    count = len(trace.layer)
    slots, allocated_in = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    slots[made_two] = slots[made_three] = np.arange(len(made_two))
    allocated_in[timeline.storage[is_allocation]] = timeline.period[is_allocation]
    copies = count + np.arange(extra * len(made_two)).reshape(extra, -1)
    layers, owners, op_layers, op_owners = (
        _relative_layers(layout, column[in_two], column[in_three])
        for column, in_two, in_three in (
            (trace.layer, made_two, made_three),
            (owned.owner, made_two, made_three),
            (trace.ops.layer, op_two, op_three),
            (owned.op_owner, op_two, op_three),
        )
    )
    freed_two, freed_three = (
        timeline.storage[two[frees]],
        timeline.storage[three[frees]],
    )
    return PeriodMatch(
        three=three,
        allocates=allocates,
        frees=frees,
        allocated_in=allocated_in,
        slots=slots,
        table=np.vstack([made_two, copies, made_three]),
        layers=layers,
        owners=owners,
        op_layers=op_layers,
        op_owners=op_owners,
        freed=_freed_storages(trace, slots, allocated_in, freed_two, freed_three),
    )


def _positions(pairs: Sequence[MiddleSpans]) -> tuple[IntArray, IntArray]:
    """Return the positions of the items of the first and the second middle period."""
    two, three = [], []
    for pair in pairs:
        first, second = (
            np.arange(start, start + pair.length) for start in (pair.first, pair.second)
        )
        two.append(first if pair.rising else second)
        three.append(second if pair.rising else first)
    return np.concatenate(two), np.concatenate(three)


def _freed_storages(
    trace: StepTrace,
    slots: IntArray,
    allocated_in: IntArray,
    two: IntArray,
    three: IntArray,
) -> PeriodReference:
    """Return the freed storages relative to the period that frees them."""
    # One of the two may be of the first or the last period, which need not correspond;
    # then the other decides.
    in_two, in_three = slots[two] >= 0, slots[three] >= 0
    if not (in_two | in_three).all():
        raise NotRepeatedError("its middle blocks free what was made far away")
    _same("whose storages they free", allocated_in[two] + 1, allocated_in[three])
    both = in_two & in_three
    _same("which storages they free", slots[two[both]], slots[three[both]])
    for name, column in (
        ("fixed", trace.fixed_bytes),
        ("slope", trace.bytes_per_sample),
    ):
        _same(f"{name} bytes of what they free", column[two], column[three])
    return PeriodReference(
        allocated_in[three] - SECOND_MIDDLE,
        np.where(in_three, slots[three], slots[two]),
        three,
    )


def _relative_layers(
    layout: RunLayout, two: NDArray[Any], three: NDArray[Any]
) -> PeriodReference:
    """Return the layers that both middle periods refer to, relative to the period.

    Raises:
        NotRepeatedError: If they do not correspond.
    """
    period_of, path = layout.kept_period_of_layers(), layout.path_of_layer
    period_two, period_three = period_of[two], period_of[three]
    middle = (period_two == FIRST_MIDDLE) | (period_two == SECOND_MIDDLE)
    fixed = (two == three) & ~middle
    inside = (
        (period_two > 0) & (period_three == period_two + 1) & (path[two] == path[three])
    )
    if not (fixed | inside).all():
        raise NotRepeatedError("its middle blocks work for different layers")
    return PeriodReference(
        period_three - SECOND_MIDDLE, np.where(fixed, -1, path[three]), three
    )


def _same(what: str, one: NDArray[Any], other: NDArray[Any]) -> None:
    if not np.array_equal(one, other):
        raise NotRepeatedError(f"its middle blocks differ in {what}")
