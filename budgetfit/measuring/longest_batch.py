"""Select the longest batch to run first, and shorter ones to run after it.

A caching allocator that meets the largest requests first serves the smaller ones from
their blocks. The other way round it may fragment, and a run that starts on short
samples fails hours later on a long one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from budgetfit.errors import InputError

MAX_INSPECTED = 1000  # batches of a loader; iteration runs its workers
MAX_OTHERS_RUN = 8  # of the others, from the longest to the shortest

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSelection:
    """The batch to measure, and shorter ones to run after it.

    Attributes:
        longest: The one with the most elements.
        others: Of other shapes, longest first; at most ``MAX_OTHERS_RUN``.
    """

    longest: Any
    others: tuple[Any, ...] = ()
    seen: int = 1


def select_batches(batch: Any) -> BatchSelection:
    """Return the longest of several batches and a selection of the others.

    Several batches are a data loader, a generator or a list of whole batches: mappings,
    or tuples or lists of tensors. Anything else is one batch.

    Raises:
        InputError: The loader or list is empty.
    """
    if not _is_several(batch):
        return BatchSelection(longest=batch)
    by_shape: dict[Shapes, Any] = {}
    seen = 0
    for item in islice(iter(batch), MAX_INSPECTED):
        seen += 1
        by_shape.setdefault(shapes_of(item), item)
    if not by_shape or not any(by_shape):
        raise InputError(
            "batch= holds no batch: the loader or list is empty. Hand in one batch, "
            "or a loader of batches as training gets them."
        )
    ordered = sorted(by_shape, key=element_count, reverse=True)
    others = _spread(ordered[1:])
    return BatchSelection(
        longest=by_shape[ordered[0]],
        others=tuple(by_shape[shapes] for shapes in others),
        seen=seen,
    )


def shapes_of(batch: object) -> Shapes:
    """Return the shapes of all tensors in a batch, in order."""
    return tuple(tuple(tensor.shape) for tensor in _tensors(batch))


def element_count(shapes: Shapes) -> int:
    """Return the number of elements of tensors of these shapes."""
    return sum(torch.Size(shape).numel() for shape in shapes)


def _spread(shapes: list[Shapes]) -> list[Shapes]:
    """Return at most ``MAX_OTHERS_RUN``, evenly from the longest to the shortest."""
    if len(shapes) <= MAX_OTHERS_RUN:
        return shapes
    last = len(shapes) - 1
    return [
        shapes[round(n * last / (MAX_OTHERS_RUN - 1))] for n in range(MAX_OTHERS_RUN)
    ]


def _is_several(value: object) -> bool:
    """Whether this is a loader, a generator, or a list of whole batches."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(
            isinstance(item, Mapping)
            or (isinstance(item, (list, tuple)) and any(True for _ in _tensors(item)))
            for item in value
        )
    known = (torch.Tensor, Mapping, str, bytes)
    return (
        isinstance(value, Iterable)
        and not isinstance(value, known)
        and not hasattr(value, "__dataclass_fields__")
        and not hasattr(value, "batch_sizes")  # a PackedSequence
    )


def _tensors(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
