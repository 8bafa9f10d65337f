"""Tensors inside tuples, lists and mappings: batches, outputs, a block's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def map_tensors(value: Any, change: Callable[[torch.Tensor], object]) -> Any:  # noqa: ANN401
    """Return ``value`` with every tensor replaced by ``change(tensor)``.

    Containers are made anew (a mapping becomes a ``dict``; named tuples and dataclasses
    stay what they are), all else is passed on as it is. A ``PackedSequence`` keeps its
    ``batch_sizes``, which belong on the CPU.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return _map_sequence(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = _fields_of(value)
        changed = {name: map_tensors(part, change) for name, part in parts.items()}
        return dataclasses.replace(value, **changed)
    return value


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of ``value`` in order; a mapping's in the order of its keys."""
    for _, tensor in named_tensors_in(value):
        yield tensor


def named_tensors_in(
    value: object, path: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of ``value`` as ``tensors_in``, with their paths: ``"a.0"``.

    The paths are those of ``tracing.batch_shapes.describe_batch``, except that a single
    tensor's is empty.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = _fields_of(value).items()
    for name, part in parts:
        yield from named_tensors_in(part, f"{path}.{name}" if path else str(name))


def _fields_of(value: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the fields that the constructor takes."""
    return {
        item.name: getattr(value, item.name)
        for item in dataclasses.fields(value)
        if item.init
    }


def _map_sequence(value: Any, change: Callable[[torch.Tensor], object]) -> Any:  # noqa: ANN401
    items = [map_tensors(item, change) for item in value]
    if isinstance(value, PackedSequence):
        items[1] = value.batch_sizes
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
