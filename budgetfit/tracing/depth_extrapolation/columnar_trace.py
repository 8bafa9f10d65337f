"""ColumnarTrace: a StepTrace as columns, with layer indices of the full model.

The indices are those of the full model even if a shortened one was traced, so that
traces of different depths can be compared and extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import (
    BlockPass,
    KernelScratch,
    OpTable,
    Phase,
    StepTrace,
    UnverifiedOp,
)
from budgetfit.tracing.recording.tensor_owners import (
    bytes_by_layer,
    single_owner,
    storage_owners,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.tracing.recording.raw_trace import RawTrace

IntArray = NDArray[np.int64]


class ModulePaths(NamedTuple):
    """The module paths of the full model, and of its candidate blocks."""

    layers: tuple[str, ...]
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnarTrace:
    """A trace in columns: storages, events, ops, phases and block passes.

    Attributes:
        batch_sizes, notes, op_names, phases, passes: As in ``StepTrace``.
        blocks, joined: Indices of the blocks that ran, and whether they are joined.
        storages: Columns of per-storage values.
        scratch, unverified: What the columns ``scratch`` and ``unverified`` index.
        events: As in ``StepTrace``.
        ops: The columns of ``OpTable``, plus ``owner``: the layer whose tensors an op
            outside modules works on.
        shares: Rows of (op, layer, bytes moved) for ops on tensor lists of several
            layers (``_foreach``).
    """

    batch_sizes: tuple[int, ...]
    storages: dict[str, IntArray]
    scratch: tuple[KernelScratch, ...]
    unverified: tuple[str, ...]
    events: IntArray
    ops: dict[str, NDArray[Any]]
    op_names: tuple[str, ...]
    shares: IntArray
    phases: tuple[Phase, ...]
    passes: tuple[BlockPass, ...]
    blocks: tuple[int, ...]
    joined: tuple[bool, ...]
    random_blocks: tuple[int, ...]
    notes: tuple[str, ...]

    @classmethod
    def from_step_trace(
        cls, trace: StepTrace, raw: RawTrace, layers: Sequence[int], blocks: IntArray
    ) -> ColumnarTrace:
        """Convert a trace that was made from ``raw``.

        ``layers`` and ``blocks`` map the traced model's indices to the full model's.
        """
        layer_map = np.array([*layers, -1], np.int64)  # -1 stays -1
        owners = storage_owners(raw.log)
        unverified = np.full(len(trace.layer), -1, np.int64)
        for number, op in enumerate(trace.unverified_ops):
            unverified[list(op.storages)] = number
        block_of = dict(zip(trace.block_names, blocks.tolist(), strict=True))
        shares = [bytes_by_layer(op, owners) for op in raw.log.ops]
        return cls(
            batch_sizes=trace.batch_sizes,
            storages={
                "fixed": trace.fixed_bytes.astype(np.int64),
                "slope": trace.bytes_per_sample.astype(np.int64),
                "category": trace.category.astype(np.int64),
                "layer": layer_map[trace.layer],
                "owner": layer_map[np.array(owners, np.int64)],
                "scratch": _interned(trace),
                "unverified": unverified,
            },
            scratch=tuple(dict.fromkeys(trace.scratch)),
            unverified=tuple(op.name for op in trace.unverified_ops),
            events=trace.events.astype(np.int64),
            ops={
                **{
                    item.name: getattr(trace.ops, item.name) for item in fields(OpTable)
                },
                "layer": layer_map[trace.ops.layer],
                "owner": layer_map[
                    np.array([single_owner(own) for own in shares], np.int64)
                ],
            },
            op_names=trace.op_names,
            shares=np.array(
                [
                    (op, layer_map[layer], size)
                    for op, own in enumerate(shares)
                    if len(own) > 1
                    for layer, size in own.items()
                ],
                np.int64,
            ).reshape(-1, 3),
            phases=trace.phases,
            passes=tuple(
                row._replace(block=int(blocks[row.block])) for row in trace.passes
            ),
            blocks=tuple(block_of[name] for name in trace.blocks),
            joined=trace.joined,
            random_blocks=tuple(block_of[name] for name in trace.random_blocks),
            notes=trace.notes,
        )

    def to_trace(self, names: ModulePaths) -> StepTrace:
        """Return the StepTrace of the full model."""
        unverified = self.storages["unverified"]
        table = {item.name: self.ops[item.name] for item in fields(OpTable)}
        return StepTrace(
            batch_sizes=self.batch_sizes,
            layers=names.layers,
            block_names=names.blocks,
            blocks=tuple(names.blocks[index] for index in self.blocks),
            joined=self.joined,
            fixed_bytes=self.storages["fixed"],
            bytes_per_sample=self.storages["slope"],
            category=self.storages["category"].astype(np.int8),
            layer=self.storages["layer"].astype(np.int32),
            scratch_index=self.storages["scratch"].astype(np.int32),
            scratch=self.scratch,
            events=self.events.astype(np.int32),
            phases=self.phases,
            passes=self.passes,
            ops=OpTable(**(table | {"layer": table["layer"].astype(np.int32)})),
            op_names=self.op_names,
            unverified_ops=tuple(
                UnverifiedOp(name, tuple(np.flatnonzero(unverified == n).tolist()))
                for n, name in enumerate(self.unverified)
            ),
            random_blocks=tuple(names.blocks[index] for index in self.random_blocks),
            notes=self.notes,
        )


def _interned(trace: StepTrace) -> IntArray:
    """Return each storage's scratch as an index into the distinct rows."""
    numbers = {row: n for n, row in enumerate(dict.fromkeys(trace.scratch))}
    rows = np.array([*(numbers[row] for row in trace.scratch), -1], np.int64)
    return rows[trace.scratch_index]


_STORAGE_SIZES = {"fixed", "slope"}
_OP_SIZES = {"flops_fixed", "flops_per_sample", "bytes_fixed", "bytes_per_sample"}


def first_difference(
    one: ColumnarTrace, other: ColumnarTrace, *, sizes: bool = True
) -> str:
    """Return a description of the first difference of two traces; empty if equal.

    Without ``sizes`` they may be of different batch sizes.
    """
    storage_sizes, op_sizes = (set(), set()) if sizes else (_STORAGE_SIZES, _OP_SIZES)
    pairs: dict[str, tuple[Any, Any]] = {
        "allocations and frees": (one.events, other.events),
        **{
            f"storages' {name}": (one.storages[name], other.storages[name])
            for name in one.storages
            if name not in {"scratch", "unverified", "owner"} | storage_sizes
        },
        "kernel scratch": (_scratch(one, sizes=sizes), _scratch(other, sizes=sizes)),
        "unverified ops": (_rows(one, "unverified"), _rows(other, "unverified")),
        "ops": (_op_names(one), _op_names(other)),
        **{
            f"ops' {name}": (one.ops[name], other.ops[name])
            for name in one.ops
            if name not in {"name", "owner"} | op_sizes
        },
        "phases": (one.phases, other.phases),
        "block passes": (one.passes, other.passes),
        "blocks": (one.blocks, other.blocks),
        "joined blocks": (one.joined, other.joined),
        "random blocks": (one.random_blocks, other.random_blocks),
        "notes": (one.notes, other.notes),
    }
    for what, (left, right) in pairs.items():
        same = (
            np.array_equal(left, right)
            if isinstance(left, np.ndarray)
            else left == right
        )
        if not same:
            return f"different {what}"
    return ""


def _rows(trace: ColumnarTrace, name: str) -> list[Any]:
    rows: tuple[Any, ...] = (*getattr(trace, name), None)
    return [rows[index] for index in trace.storages[name].tolist()]


def _scratch(trace: ColumnarTrace, *, sizes: bool) -> list[Any]:
    rows = _rows(trace, "scratch")
    if sizes:
        return rows
    return [row and (row.rule, row.part, len(row.arguments)) for row in rows]


def _op_names(trace: ColumnarTrace) -> list[str]:
    return [trace.op_names[index] for index in trace.ops["name"].tolist()]
