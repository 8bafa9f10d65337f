"""OwnedTrace: a shortened model's StepTrace in indices of the full model, with owners.

Layers and blocks are numbered as in the full model, so that traces of different depths
can be compared and extrapolated. Beside the trace stand the layers that own its
storages and ops, which extrapolation needs and a ``StepTrace`` does not keep.
"""

from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import OpTable, StepTrace
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.fake.shortened_model import Shortening
from budgetfit.tracing.recording.batch_scaling import affine_trace, exact_trace
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.tracing.recording.tensor_owners import (
    bytes_by_layer,
    single_owner,
    storage_owners,
)

IntArray = NDArray[np.int64]


class OwnedTrace(NamedTuple):
    """A trace, and the layers whose tensors its storages and ops are.

    Attributes:
        trace: With the layers and blocks of the full model.
        owner: The layer that each storage belongs to; -1: none.
        op_owner: The layer whose tensors each op outside modules works on; -1: none.
        shares: Rows of (op, layer, bytes moved) for ops on tensor lists of several
            layers (``_foreach``).
        origin, op_origin: The storage and the op of the shortened model that each is,
            or is a copy of.
    """

    trace: StepTrace
    owner: IntArray
    op_owner: IntArray
    shares: IntArray
    origin: IntArray
    op_origin: IntArray


def owned_trace(
    short: Shortening, first: RawTrace, second: RawTrace | None = None
) -> OwnedTrace:
    """Return a shortened model's trace, for all batch sizes if there is a second one.

    Raises:
        NotRepeatedError: If the shortened model has other modules than the kept ones of
            the full model.
        NotAffineError: As ``affine_trace``.
    """
    if second is None:
        trace = exact_trace(first, short.kept_blocks)
    else:
        trace = affine_trace(first, second, short.kept_blocks)
    if tuple(first.layers) != short.short_layers:
        raise NotRepeatedError("the shortened model has other modules")
    layers = [n for n, path in enumerate(short.paths.values()) if path is not None]
    layer_map = np.array([*layers, -1], np.int32)  # -1 stays -1
    blocks = [n for n, name in enumerate(short.blocks) if name not in short.left_out]
    owners = storage_owners(first.log)
    owner = np.array(owners, np.int64)
    shares = [bytes_by_layer(op, owners) for op in first.log.ops]
    op_owner = np.array([single_owner(own) for own in shares], np.int64)
    return OwnedTrace(
        trace=replace(
            trace,
            layers=tuple(short.paths),
            block_names=short.blocks,
            layer=layer_map[trace.layer],
            passes=tuple(row._replace(block=blocks[row.block]) for row in trace.passes),
            ops=replace(trace.ops, layer=layer_map[trace.ops.layer]),
        ),
        owner=layer_map[owner].astype(np.int64),
        op_owner=layer_map[op_owner].astype(np.int64),
        shares=np.array(
            [
                (op, layer_map[layer], size)
                for op, own in enumerate(shares)
                if len(own) > 1
                for layer, size in own.items()
            ],
            np.int64,
        ).reshape(-1, 3),
        origin=np.arange(len(trace.layer)),
        op_origin=np.arange(len(trace.ops.layer)),
    )


_SIZES = frozenset(
    {
        "storages' fixed",
        "storages' slope",
        "ops' flops_fixed",
        "ops' flops_per_sample",
        "ops' bytes_fixed",
        "ops' bytes_per_sample",
    }
)


def first_difference(one: StepTrace, other: StepTrace, *, sizes: bool = True) -> str:
    """Return a description of the first difference of two traces; empty if equal.

    Without ``sizes`` they may be of different batch sizes.
    """
    left, right = (_compared(each, sizes=sizes) for each in (one, other))
    for what, value in left.items():
        is_array = isinstance(value, np.ndarray)
        same = np.array_equal if is_array else lambda a, b: a == b
        if not same(value, right[what]) and (sizes or what not in _SIZES):
            return f"different {what}"
    return ""


def _compared(trace: StepTrace, *, sizes: bool) -> dict[str, Any]:
    """Return everything of a trace that is compared, by what it is."""
    rules = [
        row if sizes else (row.rule, row.part, len(row.arguments))
        for row in trace.scratch
    ]
    return {
        "allocations and frees": trace.events,
        "storages' fixed": trace.fixed_bytes,
        "storages' slope": trace.bytes_per_sample,
        "storages' category": trace.category,
        "storages' layer": trace.layer,
        "storages' stream": trace.stream,
        "kernel scratch": [
            rules[index] if index >= 0 else None
            for index in trace.scratch_index.tolist()
        ],
        "unverified ops": {
            storage: op.name for op in trace.unverified_ops for storage in op.storages
        },
        "ops": [trace.op_names[index] for index in trace.ops.name.tolist()],
        **{
            f"ops' {column.name}": getattr(trace.ops, column.name)
            for column in fields(OpTable)
            if column.name != "name"
        },
        "phases": trace.phases,
        "block passes": trace.passes,
        "blocks": trace.blocks,
        "joined blocks": trace.joined,
        "random blocks": trace.random_blocks,
        "notes": trace.notes,
    }
