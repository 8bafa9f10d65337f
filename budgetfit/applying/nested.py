"""Tensors inside tuples, lists and mappings: batches, outputs, a block's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def map_tensors(value: Any, change: Callable[[torch.Tensor], object]) -> Any:  # noqa: ANN401
    """Return ``value`` with every tensor replaced by ``change(tensor)``.

    Containers are made anew (a mapping becomes a ``dict``, a named tuple stays one),
    all else is passed on as it is.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of ``value`` in order; a mapping's in the order of its keys."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
