"""One twin for the batch's line and for the proof: a block longer, a sample larger.

A line needs a second batch size and the proof of a twin a second number of blocks
(tracing T6, T9). One trace does for both: the first twin, made one period longer, must
be the second but for sizes, and these must lie on lines. A size outside the blocks that
depended on their number would look like a line that is neither constant nor in
proportion to the batch; where one is, both are to be traced by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from budgetfit.core.step_trace import Affine, KernelScratch
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.columnar_trace import difference
from budgetfit.tracing.recording.batch_scaling import lines_through

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from budgetfit.tracing.depth_extrapolation.columnar_trace import FlatTrace, Ints
    from budgetfit.tracing.depth_extrapolation.period_labels import RunLayout

_OP_LINES = (("flops_fixed", "flops_per_sample"), ("bytes_fixed", "bytes_per_sample"))


def line_and_proof(
    one: FlatTrace,
    other: FlatTrace,
    lengthen: Callable[[FlatTrace], FlatTrace],
    layouts: Sequence[RunLayout],
) -> FlatTrace:
    """Return ``one`` for all batch sizes, and proven not to depend on its length.

    Args:
        one: A twin's trace at one batch size.
        other: That of a twin one period longer, at another.
        lengthen: Makes a trace one period longer.
        layouts: Where the runs of the twins are.

    Raises:
        NotRepeatedError: If the longer twin is not the shorter one made longer.
        NotAffineError: If its sizes are on no line.
    """
    longer, storage, op = _numbered(one, lengthen)
    found = difference(longer, other, sizes=False)
    if found:
        raise NotRepeatedError(f"one block more makes a difference: {found}")
    sizes = one.batch_sizes[0], other.batch_sizes[0]
    fixed, slope = lines_through(
        longer.storages["fixed"], other.storages["fixed"], sizes
    )
    outside = _outside(longer, layouts)
    if (outside & (fixed > 0) & (slope > 0)).any():
        raise NotRepeatedError("what is outside the blocks may depend on their number")
    storages, ops = dict(one.storages), dict(one.ops)
    storages["fixed"], storages["slope"] = _own(storage, fixed), _own(storage, slope)
    for at_zero, per_sample in _OP_LINES:
        pair = lines_through(longer.ops[at_zero], other.ops[at_zero], sizes)
        ops[at_zero], ops[per_sample] = (_own(op, column) for column in pair)
    # What an op on lists moves of the period that was added is for ``repeat_blocks``.
    lists = np.unique(one.shares[:, 0])
    ops["bytes_fixed"][lists] = one.ops["bytes_fixed"][lists]
    rows = _scratch(longer, other, sizes)
    scratch = tuple(dict.fromkeys(row for row in rows if row is not None))
    number = {row: index for index, row in enumerate(scratch)}
    index = [-1 if row is None else number[row] for row in rows]
    storages["scratch"] = _own(storage, np.array(index, np.int64))
    return one.replaced(storages=storages, ops=ops, scratch=scratch, batch_sizes=sizes)


def _numbered(
    one: FlatTrace, lengthen: Callable[[FlatTrace], FlatTrace]
) -> tuple[FlatTrace, Ints, Ints]:
    """Make a trace longer; say which storage and op of its own each is or is like."""
    counts = len(one.storages["fixed"]), len(one.ops["event"])
    longer = lengthen(
        one.replaced(
            storages=one.storages | {"number": np.arange(counts[0])},
            ops=one.ops | {"number": np.arange(counts[1])},
        )
    )
    storages, ops = dict(longer.storages), dict(longer.ops)
    storage, op = storages.pop("number"), ops.pop("number")
    return longer.replaced(storages=storages, ops=ops), storage, op


def _own(number: Ints, column: NDArray[Any]) -> NDArray[Any]:
    """Fold a column of the longer trace back to the shorter one.

    Raises:
        NotRepeatedError: If a copy differs from what it is a copy of.
    """
    folded = np.empty(number.max(initial=-1) + 1, column.dtype)
    folded[number] = column
    if not np.array_equal(folded[number], column):
        raise NotRepeatedError("its middle blocks differ in sizes")
    return folded


def _outside(flat: FlatTrace, layouts: Sequence[RunLayout]) -> NDArray[np.bool_]:
    """Say which storages belong to no period of a run."""
    inside = np.zeros(len(flat.storages["fixed"]), bool)
    for layout in layouts:
        for name in ("owner", "layer"):
            inside |= layout.period_of_layer[flat.storages[name]] >= 0
    return ~inside


def _scratch(
    longer: FlatTrace, other: FlatTrace, sizes: tuple[int, int]
) -> list[KernelScratch | None]:
    """Return each storage's scratch, its arguments as lines."""
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
            fixed, slope = lines_through(values, others, sizes)
            arguments = tuple(
                Affine(int(a), int(b)) for a, b in zip(fixed, slope, strict=True)
            )
            known[pair] = KernelScratch(one.rule, arguments, one.part)
        rows.append(known[pair])
    return rows
