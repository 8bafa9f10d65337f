"""Whose tensors an optimizer works on: no module runs there, so ops tell.

What an op makes belongs to the layer of what it was made from; of lists of tensors,
each entry to its own. A first step makes optimizer state out of nothing and learns only
at its end whose that is, so sources are noted first and followed to layers later.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from budgetfit.tracing.op_costs import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from budgetfit.tracing.recording.storage_log import StorageLog
    from budgetfit.tracing.records import OpRow, Touched


def note_sources(
    log: StorageLog,
    first: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,  # noqa: ANN401 - whatever an op returned
) -> Touched:
    """Note what the storages from ``first`` on were made from, by one op.

    Returns:
        What the op moved: the bytes of every tensor, with the storages that say whose
        they are. In lists those are all at the same position: a number that all share
        counts for each.
    """
    inputs = [*args, *kwargs.values()]
    sources = tuple(_storages(log, inputs))
    for storage in range(first, len(log.sizes)):
        log.made_from[storage] = sources
    if isinstance(out, (tuple, list)):
        lists = [x for x in inputs if _is_list(x) and len(x) == len(out)]
        for position, tensor in enumerate(out):
            storage = log.index_of(tensor) if isinstance(tensor, torch.Tensor) else -1
            if storage >= first:
                own = [given[position] for given in lists]
                log.made_from[storage] = tuple(_storages(log, own))
    touched: list[tuple[tuple[int, ...], int]] = []
    by_length: dict[int, list[Any]] = defaultdict(list)
    for value in (*inputs, out):
        if _is_list(value):
            by_length[len(value)].append(value)
        else:
            touched += [_moved(log, [value])]
    for lists in by_length.values():
        touched += [_moved(log, row) for row in zip(*lists, strict=True)]
    return tuple(row for row in touched if row[1])


def _moved(log: StorageLog, values: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    """Return the storages of some values, and the bytes of their tensors."""
    tensors = tensors_in(tuple(values))
    moved_bytes = sum(x.numel() * x.element_size() for x in tensors)
    return tuple(_storages(log, values)), moved_bytes


def _storages(log: StorageLog, values: Sequence[Any]) -> Iterator[int]:
    for tensor in tensors_in(tuple(values)):
        storage = log.index_of(tensor)
        if storage >= 0:
            yield storage


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (tuple, list))


def storage_owners(log: StorageLog) -> list[int]:
    """Return the layer that each storage belongs to, or -1."""
    owners = list(log.layers)
    for storage in sorted(log.made_from):  # what it was made from came before
        owners[storage] = only(owners[source] for source in log.made_from[storage])
    return owners


def op_shares(op: OpRow, owners: list[int]) -> dict[int, int]:
    """Return the bytes that an op moved of each layer's storages."""
    shares: dict[int, int] = defaultdict(int)
    for storages, moved_bytes in op.touched:
        owner = only(owners[storage] for storage in storages)
        if owner >= 0:
            shares[owner] += moved_bytes
    return shares


def only(owners: Iterable[int]) -> int:
    """Return the one layer among ``owners``, or -1 where there are several or none."""
    found = set(owners) - {-1}
    return found.pop() if len(found) == 1 else -1
