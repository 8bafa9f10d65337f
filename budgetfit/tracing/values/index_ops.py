"""Ops that read or write at places which a tensor of whole numbers names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten
_LISTS: Final = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index.Tensor,
)
# Their second argument is a dimension, the third the places in it.
_ALONG: Final = (
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
PLACES: Final = frozenset((*_LISTS, *_ALONG))


def places_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each dimension of the first argument, and the places in it.

    Without masks: they have been turned into places.
    """
    if func in _LISTS:
        for dim, places in enumerate(args[1]):
            if places is not None:
                yield dim, places
    elif args[0].dim():
        yield int(args[1]) % args[0].dim(), args[2]
