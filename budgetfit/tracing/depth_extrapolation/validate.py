"""Fit batch scaling and validate the depth extrapolation with one second trace.

The batch fit needs a second batch size, the validation a second depth. One trace serves
both: the first trace, extrapolated by one period, must equal the second except for
sizes, and these must be affine in the batch size. A size outside the blocks that
depended on their number would show as neither constant nor proportional to the batch;
if there is such a size, fit and validation need a trace each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from budgetfit.core.step_trace import Affine, KernelScratch
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.columnar_trace import first_difference
from budgetfit.tracing.recording.batch_scaling import fit_affine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from budgetfit.tracing.depth_extrapolation.columnar_trace import (
        ColumnarTrace,
        IntArray,
    )
    from budgetfit.tracing.depth_extrapolation.run_layout import RunLayout

_OP_FITS = (("flops_fixed", "flops_per_sample"), ("bytes_fixed", "bytes_per_sample"))


def fit_and_validate(
    one: ColumnarTrace,
    other: ColumnarTrace,
    extend: Callable[[ColumnarTrace], ColumnarTrace],
    layouts: Sequence[RunLayout],
) -> ColumnarTrace:
    """Return ``one`` fitted for all batch sizes, after validating its extrapolation.

    Args:
        one: A shortened model's trace at one batch size.
        other: That of a model one period deeper, at another batch size.
        extend: Extrapolates a trace by one period.
        layouts: Of the runs in the models.

    Raises:
        NotRepeatedError: If ``one`` extrapolated is not ``other``.
        NotAffineError: If sizes are not affine in the batch size.
    """
    longer, storage, op = _extended(one, extend)
    found = first_difference(longer, other, sizes=False)
    if found:
        raise NotRepeatedError(f"one block more makes a difference: {found}")
    sizes = one.batch_sizes[0], other.batch_sizes[0]
    fixed, slope = fit_affine(longer.storages["fixed"], other.storages["fixed"], sizes)
    outside = _outside(longer, layouts)
    if (outside & (fixed > 0) & (slope > 0)).any():
        raise NotRepeatedError("what is outside the blocks may depend on their number")
    storages, ops = dict(one.storages), dict(one.ops)
    storages["fixed"], storages["slope"] = _fold(storage, fixed), _fold(storage, slope)
    for at_zero, per_sample in _OP_FITS:
        pair = fit_affine(longer.ops[at_zero], other.ops[at_zero], sizes)
        ops[at_zero], ops[per_sample] = (_fold(op, column) for column in pair)
    # ``extrapolate_depth`` adds what ops on tensor lists move of further periods.
    lists = np.unique(one.shares[:, 0])
    ops["bytes_fixed"][lists] = one.ops["bytes_fixed"][lists]
    rows = _scratch(longer, other, sizes)
    scratch = tuple(dict.fromkeys(row for row in rows if row is not None))
    number = {row: index for index, row in enumerate(scratch)}
    index = [-1 if row is None else number[row] for row in rows]
    storages["scratch"] = _fold(storage, np.array(index, np.int64))
    return replace(one, storages=storages, ops=ops, scratch=scratch, batch_sizes=sizes)


def _extended(
    one: ColumnarTrace, extend: Callable[[ColumnarTrace], ColumnarTrace]
) -> tuple[ColumnarTrace, IntArray, IntArray]:
    """Extend a trace; also return the original index of each storage and op."""
    counts = len(one.storages["fixed"]), len(one.ops["event"])
    longer = extend(
        replace(
            one,
            storages=one.storages | {"number": np.arange(counts[0])},
            ops=one.ops | {"number": np.arange(counts[1])},
        )
    )
    storages, ops = dict(longer.storages), dict(longer.ops)
    storage, op = storages.pop("number"), ops.pop("number")
    return replace(longer, storages=storages, ops=ops), storage, op


def _fold(number: IntArray, column: NDArray[Any]) -> NDArray[Any]:
    """Fold a column of the extended trace back to the original one.

    Raises:
        NotRepeatedError: If a copy differs from its original.
    """
    folded = np.empty(number.max(initial=-1) + 1, column.dtype)
    folded[number] = column
    if not np.array_equal(folded[number], column):
        raise NotRepeatedError("its middle blocks differ in sizes")
    return folded


def _outside(flat: ColumnarTrace, layouts: Sequence[RunLayout]) -> NDArray[np.bool_]:
    """Return which storages belong to no period of a run."""
    inside = np.zeros(len(flat.storages["fixed"]), bool)
    for layout in layouts:
        for name in ("owner", "layer"):
            inside |= layout.period_of_layer[flat.storages[name]] >= 0
    return ~inside


def _scratch(
    longer: ColumnarTrace, other: ColumnarTrace, sizes: tuple[int, int]
) -> list[KernelScratch | None]:
    """Return each storage's scratch, with arguments affine in the batch size."""
    known: dict[tuple[int, int], KernelScratch] = {}
    rows: list[KernelScratch | None] = []
    pairs = zip(
        longer.storages["scratch"].tolist(),
        other.storages["scratch"].tolist(),
        strict=True,
    )
    for pair in pairs:
        if pair[0] < 0:
            rows.append(None)
            continue
        if pair not in known:
            one, two = longer.scratch[pair[0]], other.scratch[pair[1]]
            values, others = (
                np.array([each.fixed for each in row.arguments], np.int64)
                for row in (one, two)
            )
            fixed, slope = fit_affine(values, others, sizes)
            arguments = tuple(
                Affine(int(a), int(b)) for a, b in zip(fixed, slope, strict=True)
            )
            known[pair] = KernelScratch(one.rule, arguments, one.part)
        rows.append(known[pair])
    return rows
