"""Map over and iterate tensors in nested containers: batches, outputs, arguments.

Unlike ``torch.utils._pytree`` it looks into dataclasses and every ``Mapping``, without
registration.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from budgetfit.batches.sample_count import children_of, join_path


def map_tensors(value: object, change: Callable[[torch.Tensor], object]) -> Any:
    """Return ``value`` with every tensor replaced by ``change(tensor)`` (``tree_map``).

    Containers are rebuilt (a mapping becomes a ``dict``; named tuples and dataclasses
    keep their type), other leaves are passed through. A ``PackedSequence`` keeps its
    ``batch_sizes``, which have to be on the CPU.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        if isinstance(value, PackedSequence):
            items[1] = value.batch_sizes
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = children_of(value) or ()
        changed = {name: map_tensors(part, change) for name, part in fields}
        return dataclasses.replace(value, **changed)
    return value


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of ``value``, depth first (``tree_leaves``)."""
    for _, tensor in named_tensors_in(value):
        yield tensor


def named_tensors_in(
    value: object, path: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of ``value`` as ``tensors_in``, with their paths: ``"a.0"``.

    The paths are those of ``batches.batch_tree.describe_batch``, except that a single
    tensor's is empty.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for name, part in children_of(value) or ():
        yield from named_tensors_in(part, join_path(path, name))
