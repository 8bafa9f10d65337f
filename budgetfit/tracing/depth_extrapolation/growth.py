"""What the optimizer's ops on all layers take by the period.

Clipping stacks the norms of all gradients: the stack, and the scratch of the kernels
that write and read it, are as long as the model has parameters. Traces of two depths
give the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import Affine, KernelScratch, StepTrace

if TYPE_CHECKING:
    from budgetfit.tracing.depth_extrapolation.owned_trace import IntArray, OwnedTrace
    from budgetfit.tracing.depth_extrapolation.run_layout import RunLayout


class Growth(NamedTuple):
    """What one period more of each run adds in the optimizer, outside the periods.

    By the storages and ops of the shortened model.

    Attributes:
        storages: Bytes of each storage.
        scratch: The arguments of the kernel rules that size some storages.
        ops: Bytes that each op moves.
    """

    storages: IntArray
    scratch: dict[int, tuple[int, ...]]
    ops: NDArray[np.float64]


def find_growth(
    longer: OwnedTrace, other: OwnedTrace, layouts: Sequence[RunLayout]
) -> Growth | None:
    """Return what ``other`` has more than a trace that was extrapolated to its depth.

    None if it is no more, or if they differ in other ways: that each period adds as
    much is taken of sizes which those of the shortened model can have made up.
    """
    one, two = longer.trace, other.trace
    if not np.array_equal(one.events, two.events) or len(one.ops.event) != len(
        two.ops.event
    ):
        return None
    allocated_at = np.zeros(len(one.fixed_bytes), np.int64)
    mallocs = np.flatnonzero(one.events > 0)
    allocated_at[one.events[mallocs] - 1] = mallocs
    may_grow = _in_optimizer(one, allocated_at) & _once(longer.origin)
    periods = min(_kept_periods(layout) for layout in layouts)
    more = _more(one.fixed_bytes, two.fixed_bytes, may_grow, periods)
    moved = _more(
        one.ops.bytes_fixed,
        two.ops.bytes_fixed,
        _in_optimizer(one, one.ops.event) & _once(longer.op_origin),
        periods,
    )
    scratch = {
        int(longer.origin[storage]): added
        for storage in np.flatnonzero(may_grow).tolist()
        if (added := _added_arguments(one, two, storage, periods))
    }
    if not (more.any() or scratch or moved.any()):
        return None
    return Growth(
        np.bincount(longer.origin, more).astype(np.int64),
        scratch,
        np.bincount(longer.op_origin, moved).astype(np.float64),
    )


def grown(owned: OwnedTrace, growth: Growth, periods: int) -> OwnedTrace:
    """Return an extrapolated trace with what so many periods more of each run add."""
    trace = owned.trace
    rows = [trace.scratch[n] if n >= 0 else None for n in trace.scratch_index.tolist()]
    for storage, origin in enumerate(owned.origin.tolist()):
        row, added = rows[storage], growth.scratch.get(origin)
        if row is not None and added is not None:
            arguments = (
                Affine(each.fixed + periods * more, each.per_sample)
                for each, more in zip(row.arguments, added, strict=True)
            )
            rows[storage] = row._replace(arguments=tuple(arguments))
    scratch = tuple(dict.fromkeys(row for row in rows if row is not None))
    number: dict[KernelScratch[Affine] | None, int] = {
        row: n for n, row in enumerate(scratch)
    }
    moved = trace.ops.bytes_fixed + periods * growth.ops[owned.op_origin]
    return owned._replace(
        trace=replace(
            trace,
            fixed_bytes=trace.fixed_bytes + periods * growth.storages[owned.origin],
            scratch_index=np.array(
                [number.get(row, -1) for row in rows], trace.scratch_index.dtype
            ),
            scratch=scratch,
            ops=replace(trace.ops, bytes_fixed=moved),
        )
    )


def _in_optimizer(trace: StepTrace, places: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return which events, or ops by the events before them, are in the optimizer."""
    inside = np.zeros(len(places), bool)
    for phase in trace.phases:
        if phase.name == "optimizer":
            inside |= (phase.start <= places) & (places < phase.end)
    return inside


def _once(origin: IntArray) -> NDArray[np.bool_]:
    """Return what has no copies: all that is outside of the middle periods."""
    return (np.bincount(origin) == 1)[origin]


def _kept_periods(layout: RunLayout) -> float:
    """Return how many periods a shortened model has; its first is the end of one."""
    blocks = sum(len(layout.blocks[period]) for period in layout.kept)
    return blocks / len(layout.blocks[1])


def _more(
    one: NDArray[Any], other: NDArray[Any], may_grow: NDArray[np.bool_], periods: float
) -> NDArray[Any]:
    """Return by how much sizes are larger, where ``periods`` times that are in them."""
    # What grows with the square is less than that.
    more = other - one
    return np.where(may_grow & (more > 0) & (periods * more <= one), more, 0)


def _added_arguments(
    one: StepTrace, other: StepTrace, storage: int, periods: float
) -> tuple[int, ...]:
    """Return what a kernel rule's arguments are larger by; empty: they are not."""
    index, longer = int(one.scratch_index[storage]), int(other.scratch_index[storage])
    if index < 0 or longer < 0:
        return ()
    row, deeper = one.scratch[index], other.scratch[longer]
    if (row.rule, row.part) != (deeper.rule, deeper.part):
        return ()
    sizes, larger = (
        np.array([each.fixed for each in found.arguments], np.int64)
        for found in (row, deeper)
    )
    added = _more(sizes, larger, np.ones(len(sizes), bool), periods)
    return tuple(added.tolist()) if added.any() else ()
