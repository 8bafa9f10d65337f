"""Put DDP's buckets into a trace: of what it sends, and of the gradients.

A trace has what goes into them, parameter by parameter (``data_parallel``), so that it
can be extrapolated to all blocks first: a bucket has gradients of several.

Sources: ``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets`` and
``sync_bucket_indices``; ``torch/nn/parallel/distributed.py``, of torch 2.13.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _get_default_group

from budgetfit.core.parallelism import Parallelism
from budgetfit.core.step_trace import CATEGORIES, OpTable, StepTrace
from budgetfit.tracing.cuda.op_semantics import imitate_cuda
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.model_copy import fake_mode
from budgetfit.tracing.recording.distributed.data_parallel import (
    BROADCAST,
    BUCKET,
    REBUILD,
    REDUCE,
)
from budgetfit.tracing.recording.distributed.process_group import fake_process_group
from budgetfit.tracing.recording.distributed.rank_log import RankLog

_MIB: Final = 2**20
_DEFAULT_CAP_MIB: Final = 25
_INDEX_BYTES: Final = 4
_SENT_AT_ONCE: Final = 250 * _MIB  # DistributedDataParallel.broadcast_bucket_size
_COLLECTIVES: Final = {
    BROADCAST: "c10d.broadcast_.default",
    REDUCE: "c10d.allreduce_.default",
}


class _Entry(NamedTuple):
    """An op that ``data_parallel`` logged: its number, and its tensor."""

    op: int
    event: int
    name: str
    dtype: torch.dtype
    size: int


class _Edit(NamedTuple):
    """Events before ``end`` are replaced; from ``op`` on the ops come behind them."""

    op: int
    end: int
    removed: int
    events: list[int]

    @property
    def shift(self) -> int:
        """By how much what follows moves."""
        return len(self.events) - self.removed


@dataclass(slots=True)
class _Changes:
    """What a trace is changed by.

    Attributes:
        known: The number of its storages: new ones follow.
        sizes: Of the new storages.
        resized: Storage -> its bytes.
        edits: Of the events, in order.
        collectives: Op -> the name and the bytes that it has.
    """

    known: int
    sizes: list[int] = field(default_factory=list)
    resized: dict[int, int] = field(default_factory=dict)
    edits: list[_Edit] = field(default_factory=list)
    collectives: dict[int, tuple[str, int]] = field(default_factory=dict)

    def new_storage(self, size_bytes: int) -> int:
        """Return a new storage."""
        self.sizes.append(size_bytes)
        return self.known + len(self.sizes) - 1

    def exchange(self, entries: Sequence[_Entry], groups: list[list[int]]) -> None:
        """Exchange each bucket where its last tensor is there."""
        for group in groups:
            last = entries[max(group)]
            size = sum(entries[n].size for n in group)
            self.collectives[last.op] = _COLLECTIVES[last.name], size


def with_buckets(
    trace: StepTrace, parallelism: Parallelism, target: CudaTarget | None
) -> StepTrace:
    """Return the trace with DDP's buckets.

    ``trace``: at full depth, of one rank; ``target``: the GPU whose semantics are
    imitated.
    """
    entries = _entries(trace)
    changes = _Changes(len(trace.fixed_bytes))
    first: list[_Entry] = []  # the first buckets, one of each dtype
    reduced: list[_Entry] = []  # the gradients in them
    rebuilt = False
    for (name, _), group in itertools.groupby(entries, _call_of(trace)):
        found = list(group)
        if name == BROADCAST:
            _broadcast(changes, found, parallelism, target)
        elif name == BUCKET:
            first = found
        elif name == REBUILD:
            rebuilt = True
            _rebuild(changes, trace, first, found, _sizes(reduced, parallelism))
        elif rebuilt:
            changes.exchange(found, _assignment(found, _limits(parallelism)))
        else:
            reduced = found
            changes.exchange(found, list(_by_dtype(found).values()))
    _size_first_buckets(changes, trace, first, reduced)
    return _changed(trace, changes, entries)


def _entries(trace: StepTrace) -> list[_Entry]:
    """Return the ops that ``data_parallel`` logged, in order."""
    kinds = {}
    for number, full_name in enumerate(trace.op_names):
        name, _, dtype = full_name.partition(" ")
        if name in {BROADCAST, BUCKET, REDUCE, REBUILD}:
            kinds[number] = name, getattr(torch, dtype)
    ops = trace.ops
    return [
        _Entry(op, int(ops.event[op]), *kinds[number], int(ops.bytes_fixed[op]))
        for op, number in enumerate(ops.name.tolist())
        if number in kinds
    ]


def _call_of(trace: StepTrace) -> Callable[[_Entry], tuple[str, int]]:
    """Return what tells an entry's call: each phase has one of a kind."""
    # What DDP does before a forward may follow no event of that phase.
    starts = [phase.start for phase in trace.phases]

    def call(entry: _Entry) -> tuple[str, int]:
        search = bisect_left if entry.name == REDUCE else bisect_right
        return entry.name, search(starts, entry.event)

    return call


def _limits(parallelism: Parallelism) -> list[int]:
    """Return the bytes of the first bucket and of the others."""
    if parallelism.bucket_cap_mb is None:
        return [c10d._DEFAULT_FIRST_BUCKET_BYTES, _DEFAULT_CAP_MIB * _MIB]
    return [parallelism.bucket_cap_mb * _MIB] * 2


def _assignment(entries: Sequence[_Entry], limits: list[int]) -> list[list[int]]:
    """Return the positions of the entries of each bucket."""
    tensors = [
        torch.empty(each.size // each.dtype.itemsize, dtype=each.dtype, device="meta")
        for each in entries
    ]
    groups: list[list[int]]
    groups, _ = c10d._compute_bucket_assignment_by_size(tensors, limits, [])
    return groups


def _by_dtype(entries: Sequence[_Entry]) -> dict[torch.dtype, list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for number, entry in enumerate(entries):
        groups.setdefault(entry.dtype, []).append(number)
    return groups


def _broadcast(
    changes: _Changes,
    entries: list[_Entry],
    parallelism: Parallelism,
    target: CudaTarget | None,
) -> None:
    """Send tensors from rank 0: torch's own ``_broadcast_coalesced``, on fakes."""
    semantics, imitation = imitate_cuda(target)
    with fake_mode() as mode, fake_process_group(parallelism.gpus):
        tensors = [
            torch.empty(each.size // each.dtype.itemsize, dtype=each.dtype)
            for each in entries
        ]
        log = RankLog(semantics, mode=mode)
        for tensor in tensors:
            log.log_storage(tensor)
        known = len(log.events)
        with imitation, log:
            c10d._broadcast_coalesced(_get_default_group(), tensors, _SENT_AT_ONCE, 0)
        log.close()
    numbers = [changes.new_storage(size) for size in log.sizes[known:]]
    events = [
        int(np.sign(event)) * (numbers[abs(event) - 1 - known] + 1)
        for event in log.events[known:]
    ]
    changes.edits.append(_Edit(entries[0].op, entries[0].event, 0, events))
    changes.exchange(entries, _assignment(entries, [_SENT_AT_ONCE]))


def _allocated_before(trace: StepTrace, entries: list[_Entry]) -> list[int]:
    """Return the storages of as many allocations, which the entries follow."""
    end = entries[0].event if entries else 0
    return [int(event) - 1 for event in trace.events[end - len(entries) : end]]


def _rebuild(
    changes: _Changes,
    trace: StepTrace,
    first: list[_Entry],
    entries: list[_Entry],
    sizes: list[list[int]],
) -> None:
    """Replace the first buckets by those in the order in which gradients arrived."""
    numbers = [sum(map(len, sizes)) + 1, len(sizes)]
    exchanged = [changes.new_storage(_INDEX_BYTES * number) for number in numbers]
    placeholders = _allocated_before(trace, entries)
    buckets = [sum(bucket) for bucket in sizes]
    changes.resized.update(zip(placeholders, buckets, strict=False))
    more = [changes.new_storage(size) for size in buckets[len(placeholders) :]]
    changes.edits.append(
        _Edit(
            entries[0].op,
            entries[0].event,
            2 * len(entries),
            [
                *(storage + 1 for storage in exchanged),
                *(-(storage + 1) for storage in reversed(exchanged)),
                *(-(storage + 1) for storage in _allocated_before(trace, first)),
                *(storage + 1 for storage in (*placeholders, *more)),
            ],
        )
    )


def _sizes(entries: list[_Entry], parallelism: Parallelism) -> list[list[int]]:
    """Return the sizes of the gradients in each bucket, as they have arrived."""
    groups = _assignment(entries, _limits(parallelism))
    return [[entries[n].size for n in group] for group in groups]


def _size_first_buckets(
    changes: _Changes, trace: StepTrace, first: list[_Entry], reduced: list[_Entry]
) -> None:
    groups = _by_dtype(reduced)
    for bucket, storage in zip(first, _allocated_before(trace, first), strict=True):
        size = sum(reduced[n].size for n in groups.get(bucket.dtype, ()))
        changes.resized[storage] = size


def _changed(trace: StepTrace, changes: _Changes, entries: list[_Entry]) -> StepTrace:
    """Return the trace with the changes; entries that exchange nothing are left out."""
    new = len(changes.sizes)

    def longer(column: Any, more: Any) -> Any:
        return np.concatenate([column, np.full(new, more, column.dtype)])

    fixed = longer(trace.fixed_bytes, 0)
    fixed[changes.known :] = changes.sizes
    for storage, size in changes.resized.items():
        fixed[storage] = size
    return replace(
        trace,
        fixed_bytes=fixed,
        bytes_per_sample=longer(trace.bytes_per_sample, 0),
        category=longer(trace.category, CATEGORIES.index("temporaries")),
        layer=longer(trace.layer, -1),
        scratch_index=longer(trace.scratch_index, -1),
        **_moved(trace, changes),
        **_ops(trace, changes, entries),
    )


def _moved(trace: StepTrace, changes: _Changes) -> dict[str, Any]:
    """Return the edited events, and the ranges of them."""
    parts: list[Any] = []
    done = 0
    for edit in changes.edits:
        parts += [trace.events[done : edit.end - edit.removed], edit.events]
        done = edit.end
    parts.append(trace.events[done:])

    def moved(position: int) -> int:
        # What starts where something is put has it inside.
        return position + sum(
            edit.shift for edit in changes.edits if edit.end - edit.removed < position
        )

    phases, passes = (
        tuple(row._replace(start=moved(row.start), end=moved(row.end)) for row in rows)
        for rows in (trace.phases, trace.passes)
    )
    events = np.concatenate(parts).astype(trace.events.dtype)
    return {"events": events, "phases": phases, "passes": passes}


def _ops(trace: StepTrace, changes: _Changes, entries: list[_Entry]) -> dict[str, Any]:
    """Return the ops behind the edited events, with the collectives."""
    names = list(dict.fromkeys((*trace.op_names, *_COLLECTIVES.values())))
    ops = replace(
        trace.ops,
        name=trace.ops.name.copy(),
        bytes_fixed=trace.ops.bytes_fixed.copy(),
        event=trace.ops.event.copy(),
    )
    for op, (name, size) in changes.collectives.items():
        ops.name[op], ops.bytes_fixed[op] = names.index(name), size
    for edit in changes.edits:
        ops.event[edit.op :] += edit.shift
    kept = np.ones(len(ops.event), bool)
    kept[[each.op for each in entries if each.op not in changes.collectives]] = False
    table = OpTable(*(getattr(ops, each.name)[kept] for each in fields(OpTable)))
    used, index = np.unique(table.name, return_inverse=True)
    table = replace(table, name=index.astype(table.name.dtype))
    return {"ops": table, "op_names": tuple(names[number] for number in used.tolist())}
