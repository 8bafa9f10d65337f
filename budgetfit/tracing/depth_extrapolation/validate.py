"""Fit batch scaling and validate the depth extrapolation with one second trace.

The batch fit needs a second batch size, the validation a second depth. One trace serves
both: the first trace, extrapolated by one period, must equal the second except for
sizes, and these must be affine in the batch size. A size outside the blocks that
depended on their number would show as neither constant nor proportional to the batch;
if there is such a size, fit and validation need a trace each.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import Affine, KernelScratch, SizeLimit, StepTrace
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.extrapolate import extrapolate
from budgetfit.tracing.depth_extrapolation.growth import Growth, find_growth, grown
from budgetfit.tracing.depth_extrapolation.owned_trace import (
    IntArray,
    OwnedTrace,
    first_difference,
)
from budgetfit.tracing.depth_extrapolation.run_layout import RunLayout
from budgetfit.tracing.recording.batch_scaling import NotAffineError, fit_affine


def validate(
    one: OwnedTrace, other: OwnedTrace, layouts: Sequence[RunLayout]
) -> Growth | None:
    """Check that ``one`` extrapolated by one period equals ``other``.

    Args:
        one: A shortened model's trace.
        other: That of a model one period deeper, at the same batch size.
        layouts: Of the runs in the models.

    Returns:
        What grows with the periods outside of them; None: nothing.

    Raises:
        NotRepeatedError: If they differ, or ``one`` cannot be extrapolated.
    """
    longer = _one_longer(one, layouts)
    growth = find_growth(longer, other, layouts)
    if growth is not None:
        longer = grown(longer, growth, 1)
    _check_same(longer, other, sizes=True)
    return growth


def _one_longer(one: OwnedTrace, layouts: Sequence[RunLayout]) -> OwnedTrace:
    return extrapolate(one, layouts, [1] * len(layouts))


def _check_same(longer: OwnedTrace, other: OwnedTrace, *, sizes: bool) -> None:
    """Raise an error if two traces of one depth differ."""
    found = first_difference(longer.trace, other.trace, sizes=sizes)
    if found:
        raise NotRepeatedError(f"one block more makes a difference: {found}")


def fit_and_validate(
    one: OwnedTrace, other: OwnedTrace, layouts: Sequence[RunLayout]
) -> OwnedTrace:
    """Return ``one`` fitted for all batch sizes, after validating its extrapolation.

    Arguments as ``validate``, with ``other`` at another batch size.

    Raises:
        NotRepeatedError: If ``one`` extrapolated is not ``other``.
        NotAffineError: If sizes are not affine in the batch size.
    """
    longer = _one_longer(one, layouts)
    _check_same(longer, other, sizes=False)
    trace, deeper = longer.trace, other.trace
    sizes = trace.batch_sizes[0], deeper.batch_sizes[0]
    fixed, slope = fit_affine(trace.fixed_bytes, deeper.fixed_bytes, sizes)
    if (_outside(longer, layouts) & (fixed > 0) & (slope > 0)).any():
        raise NotRepeatedError("what is outside the blocks may depend on their number")
    flops, bytes_moved = (
        [
            _fold(longer.op_origin, column)
            for column in fit_affine(
                getattr(trace.ops, name), getattr(deeper.ops, name), sizes
            )
        ]
        for name in ("flops_fixed", "bytes_fixed")
    )
    # ``extrapolate`` adds what ops on tensor lists move of further periods.
    lists = np.unique(one.shares[:, 0])
    bytes_moved[0][lists] = one.trace.ops.bytes_fixed[lists]
    rows = _scratch(trace, deeper, sizes)
    scratch = tuple(dict.fromkeys(row for row in rows if row is not None))
    number: dict[KernelScratch[Affine] | None, int] = {
        row: n for n, row in enumerate(scratch)
    }
    index = np.array([number.get(row, -1) for row in rows], np.int32)
    return one._replace(
        trace=replace(
            one.trace,
            batch_sizes=sizes,
            fixed_bytes=_fold(longer.origin, fixed),
            bytes_per_sample=_fold(longer.origin, slope),
            scratch_index=_fold(longer.origin, index),
            scratch=scratch,
            size_limits=_size_limits(trace, deeper, sizes),
            ops=replace(
                one.trace.ops,
                flops_fixed=flops[0],
                flops_per_sample=flops[1],
                bytes_fixed=bytes_moved[0],
                bytes_per_sample=bytes_moved[1],
            ),
        )
    )


def _size_limits(
    one: StepTrace, other: StepTrace, sizes: tuple[int, int]
) -> tuple[SizeLimit[Affine], ...]:
    """Return the size limits with numbers affine in the batch size."""
    # Each has equal ones once: a further period adds none.
    rows, others = one.size_limits, other.size_limits
    if [row[:2] for row in rows] != [row[:2] for row in others]:
        raise NotAffineError("kernels count other sizes at another batch size")
    here, there = (
        np.array([row.number.fixed for row in each], np.int64)
        for each in (rows, others)
    )
    numbers = zip(*fit_affine(here, there, sizes), strict=True)
    return tuple(
        row._replace(number=Affine(int(fixed), int(slope)))
        for row, (fixed, slope) in zip(rows, numbers, strict=True)
    )


def compare_forward(trace: StepTrace, forward: StepTrace) -> None:
    """Check that a trace begins with the first forward of a full model.

    ``forward``: of the full model at one of its batch sizes, and nothing after it.

    Raises:
        NotRepeatedError: If it does not.
    """
    end = next(row.end for row in forward.phases if row.name == "forward")
    one, other = (
        _beginning(each, forward.batch_sizes[0], end, len(forward.ops.event))
        for each in (trace, forward)
    )
    for what, value in one.items():
        if not np.array_equal(value, other[what]):
            raise NotRepeatedError(f"the full model's forward has different {what}")


def _beginning(
    trace: StepTrace, batch_size: int, end: int, ops: int
) -> dict[str, NDArray[Any]]:
    """Return what is compared of a trace up to an event and an op."""
    events = trace.events[:end]
    made = events.max(initial=0)
    sizes = trace.fixed_bytes + trace.bytes_per_sample * batch_size
    names = np.array(trace.op_names)
    passes = [p for p in trace.passes if p.direction == "forward" and p.end <= end]
    return {
        "allocations and frees": events,
        "sizes": sizes[:made],
        "ops": names[trace.ops.name[:ops]],
        "ops' events": trace.ops.event[:ops],
        "ops' layers": trace.ops.layer[:ops],
        "block passes": np.array(passes),
    }


def _fold(origin: IntArray, column: NDArray[Any]) -> NDArray[Any]:
    """Fold a column of the extended trace back to the original one.

    Raises:
        NotRepeatedError: If a copy differs from its original.
    """
    folded = np.empty(origin.max(initial=-1) + 1, column.dtype)
    folded[origin] = column
    if not np.array_equal(folded[origin], column):
        raise NotRepeatedError("its middle blocks differ in sizes")
    return folded


def _outside(longer: OwnedTrace, layouts: Sequence[RunLayout]) -> NDArray[np.bool_]:
    """Return which storages belong to no period of a run."""
    inside = np.zeros(len(longer.owner), bool)
    for layout in layouts:
        for column in (longer.owner, longer.trace.layer):
            inside |= layout.period_of_layer[column] >= 0
    return ~inside


def _scratch(
    longer: StepTrace, other: StepTrace, sizes: tuple[int, int]
) -> list[KernelScratch[Affine] | None]:
    """Return each storage's scratch, with arguments affine in the batch size."""
    known: dict[tuple[int, int], KernelScratch[Affine]] = {}
    rows: list[KernelScratch[Affine] | None] = []
    columns = longer.scratch_index.tolist(), other.scratch_index.tolist()
    for pair in zip(*columns, strict=True):
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
