"""Ops that index a tensor with an integer tensor: index, gather, scatter, index_add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten
_INDEX_LISTS: Final = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index.Tensor,
)
# Their second argument is a dimension, the third the indices along it.
_ALONG_DIM: Final = (
    aten.gather.default,
    aten.index_select.default,
    aten.index_add.default,
    aten.index_add_.default,
    aten.index_copy.default,
    aten.index_copy_.default,
    aten.scatter.src,
    aten.scatter_.src,
    aten.scatter.value,
    aten.scatter_.value,
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
)
INDEX_OPS: Final = frozenset((*_INDEX_LISTS, *_ALONG_DIM))


def indices_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each indexed dimension of the first argument, with its indices.

    Boolean masks must have been converted to indices.
    """
    if func in _INDEX_LISTS:
        for dim, indices in enumerate(args[1]):
            if indices is not None:
                yield dim, indices
    elif args[0].dim():
        yield int(args[1]) % args[0].dim(), args[2]
