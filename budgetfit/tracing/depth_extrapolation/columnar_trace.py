"""FlatTrace: a StepTrace taken apart into arrays, its layers those of the whole model.

Indices into layers and blocks are those of the whole model even where a twin with fewer
blocks was traced; that is what lets traces of different twins be compared, and one be
made longer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
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
from budgetfit.tracing.recording.tensor_owners import only, op_shares, storage_owners

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.tracing.recording.raw_trace import RawTrace

Ints = NDArray[np.int64]


class Names(NamedTuple):
    """The module paths of a whole model, and of its candidate blocks."""

    layers: tuple[str, ...]
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FlatTrace:
    """A trace as arrays: storages, events, ops, and where phases and passes lie.

    Attributes:
        batch_sizes, notes, op_names, phases, passes: As in ``StepTrace``.
        blocks, joined: The blocks that ran, as indices, and whether they are joined.
        storages: One row per ``STORAGE`` fact, one column per storage.
        scratch, unverified: What the columns ``scratch`` and ``unverified`` index.
        events: As in ``StepTrace``.
        ops: One row per fact of ``OpTable``, plus ``owner``: the layer whose tensors an
            op works on where no module runs.
        shares: Rows of (op, layer, bytes) that ops on lists move of each layer's
            tensors.
    """

    batch_sizes: tuple[int, ...]
    storages: dict[str, Ints]
    scratch: tuple[KernelScratch, ...]
    unverified: tuple[str, ...]
    events: Ints
    ops: dict[str, NDArray[Any]]
    op_names: tuple[str, ...]
    shares: Ints
    phases: tuple[Phase, ...]
    passes: tuple[BlockPass, ...]
    blocks: tuple[int, ...]
    joined: tuple[bool, ...]
    random_blocks: tuple[int, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, trace: StepTrace, raw: RawTrace, layers: Sequence[int], blocks: Ints
    ) -> FlatTrace:
        """Take a trace apart that was made of ``raw``.

        ``layers`` and ``blocks`` say where the twin's own are in the whole model.
        """
        place = np.array([*layers, -1], np.int64)  # -1 stays -1
        owners = storage_owners(raw.log)
        unverified = np.full(len(trace.layer), -1, np.int64)
        for number, op in enumerate(trace.unverified_ops):
            unverified[list(op.storages)] = number
        block_of = dict(zip(trace.block_names, blocks.tolist(), strict=True))
        shares = [op_shares(op, owners) for op in raw.log.ops]
        return cls(
            batch_sizes=trace.batch_sizes,
            storages={
                "fixed": trace.fixed_bytes.astype(np.int64),
                "slope": trace.bytes_per_sample.astype(np.int64),
                "category": trace.category.astype(np.int64),
                "layer": place[trace.layer],
                "owner": place[np.array(owners, np.int64)],
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
                "layer": place[trace.ops.layer],
                "owner": place[np.array([only(own) for own in shares], np.int64)],
            },
            op_names=trace.op_names,
            shares=np.array(
                [
                    (op, place[layer], size)
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

    def to_trace(self, names: Names) -> StepTrace:
        """Put it together again, for the whole model."""
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

    def replaced(self, **changes: Any) -> FlatTrace:  # noqa: ANN401 - any field
        """Return a copy with other content."""
        return replace(self, **changes)


def _interned(trace: StepTrace) -> Ints:
    """Return each storage's scratch as an index into the rows that differ."""
    numbers = {row: n for n, row in enumerate(dict.fromkeys(trace.scratch))}
    rows = np.array([*(numbers[row] for row in trace.scratch), -1], np.int64)
    return rows[trace.scratch_index]


_STORAGE_SIZES = {"fixed", "slope"}
_OP_SIZES = {"flops_fixed", "flops_per_sample", "bytes_fixed", "bytes_per_sample"}


def difference(one: FlatTrace, other: FlatTrace, *, sizes: bool = True) -> str:
    """Return what differs between two traces, in words; empty if nothing.

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


def _rows(flat: FlatTrace, name: str) -> list[Any]:
    rows: tuple[Any, ...] = (*getattr(flat, name), None)
    return [rows[index] for index in flat.storages[name].tolist()]


def _scratch(flat: FlatTrace, *, sizes: bool) -> list[Any]:
    rows = _rows(flat, "scratch")
    if sizes:
        return rows
    return [row and (row.rule, row.part, len(row.arguments)) for row in rows]


def _op_names(flat: FlatTrace) -> list[str]:
    return [flat.op_names[index] for index in flat.ops["name"].tolist()]
