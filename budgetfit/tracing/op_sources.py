"""Whose tensors an optimizer works on: no module runs there, so ops tell.

What an op makes belongs to the layer of what it was made from; of lists of tensors,
each entry to its own. A first step makes optimizer state out of nothing and learns only
at its end whose that is, so sources are noted first and followed to layers later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from budgetfit.tracing.op_costs import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from budgetfit.tracing.storage_log import OpRow, StorageLog


def note_sources(
    log: StorageLog,
    first: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,  # noqa: ANN401 - whatever an op returned
) -> tuple[tuple[int, int], ...]:
    """Note what the storages from ``first`` on were made from, by one op.

    Returns:
        Each storage that the op read or wrote, with the bytes it moved of it.
    """
    inputs = tensors_in((args, kwargs))
    sources = tuple(filter(_is_storage, map(log.index_of, inputs)))
    for storage in range(first, len(log.sizes)):
        log.made_from[storage] = sources
    if isinstance(out, (tuple, list)):
        lists = [x for x in args if isinstance(x, (tuple, list)) and len(x) == len(out)]
        for position, tensor in enumerate(out):
            storage = log.index_of(tensor)
            if storage >= first:
                own = tensors_in([given[position] for given in lists])
                log.made_from[storage] = tuple(
                    filter(_is_storage, map(log.index_of, own))
                )
    return tuple(
        (log.index_of(tensor), tensor.numel() * tensor.element_size())
        for tensor in (*inputs, *tensors_in(out))
    )


def _is_storage(index: int) -> bool:
    return index >= 0


def storage_owners(log: StorageLog) -> list[int]:
    """Return the layer that each storage belongs to, or -1."""
    owners = list(log.layers)
    for storage in sorted(log.made_from):  # what it was made from came before
        owners[storage] = only(owners[source] for source in log.made_from[storage])
    return owners


def op_shares(op: OpRow, owners: list[int]) -> dict[int, int]:
    """Return the bytes that an op moved of each layer's storages."""
    shares: dict[int, int] = {}
    for storage, moved_bytes in op.touched:
        owner = owners[storage] if storage >= 0 else -1
        if owner >= 0:
            shares[owner] = shares.get(owner, 0) + moved_bytes
    return shares


def only(owners: Iterable[int]) -> int:
    """Return the one layer among ``owners``, or -1 where there are several or none."""
    found = set(owners) - {-1}
    return found.pop() if len(found) == 1 else -1
