"""A batch is any nesting of tensors; here its batch size is read and changed.

Mappings (transformers' ``BatchEncoding`` and ``ModelOutput`` among them), tuples, named
tuples, lists, dataclasses and single tensors are understood; anything else in a batch
(numbers, flags, text, None) is handed through untouched.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from budgetfit.batches.sample_count import (
    children_of,
    count_samples,
    dimension_of,
    goes_whole,
    holds_samples,
    join,
    packed_rows,
)
from budgetfit.core.sample_dims import FIRST, LONE, SampleDims
from budgetfit.errors import InputError

# A tensor, or any nesting of containers that hold some.
Batch: TypeAlias = Any


def batch_size_of(batch: Batch, *, dims: SampleDims = FIRST) -> int:
    """Return how many samples a batch holds, as ``count_samples`` does.

    Args:
        batch: Batch nesting of tensors; real, meta and fake ones alike.
        dims: The dimension that counts samples; the first unless the model says
            otherwise (``made_batch.batch_dimension``), or the user of a part.

    Raises:
        InputError: No tensor has that dimension, the batch is empty, or it is not what
            the user says of it.
    """
    for _ in _named_tensors(batch):  # refuses what has no batch dimension
        pass
    batch_size = count_samples(batch, dims)
    if batch_size is None:
        raise InputError(
            "The batch holds no tensor with a batch dimension. Pass the tensors that "
            "the model is called with, for example "
            'batch={"input_ids": torch.zeros(2, 128, dtype=torch.long)}.'
        )
    if batch_size == 0:
        raise InputError(
            "The batch is empty: its tensors have a batch dimension of 0. Pass one "
            "with at least one sample."
        )
    return batch_size


def resize_batch(
    batch: Batch, batch_size: int, *, dims: SampleDims = FIRST, of_first: int = 0
) -> Batch:
    """Return the same batch with ``batch_size`` samples: rows repeated or cut off.

    Values stay valid, because every row is one of the given rows. Rows of boxes, nodes
    or patches move with their sample (``core.batch_samples``). Other tensors whose
    batch dimension differs from the batch's size stay as they are. Resized tensors own
    storages of exactly their size, as those from a data loader do; the given batch is
    not changed.

    Args:
        batch: Batch nesting of tensors; real, meta and fake ones alike.
        batch_size: Samples in the result, at least 1.
        dims: The dimension that counts samples.
        of_first: Repeat so many of the first samples alone; 0 for all.

    Raises:
        InputError: The size is below 1, or ``batch_size_of`` finds none in the batch.
    """
    if batch_size < 1:
        raise InputError(f"A batch needs at least 1 sample, not {batch_size}.")
    old_size = batch_size_of(batch, dims=dims)
    used = min(of_first or old_size, old_size)

    def resized(part: Batch, path: str) -> Batch:
        if isinstance(part, Tensor):
            dim = dimension_of(part, old_size, dims, path)
            return part if dim is None else _repeat_rows(part, batch_size, dim, used)
        if holds_samples(part, old_size, dims, path):
            rows = [part[row % used] for row in range(batch_size)]
            return type(part)(
                _own(row) if isinstance(row, Tensor) else copy.copy(row) for row in rows
            )
        if goes_whole(part, dims, path):
            return list(part)
        packed, index = packed_rows(part, old_size, dims, path)
        if packed:
            others = {name: part[name] for name in part if name not in packed}
            packed = {name: shares[:used] for name, shares in packed.items()}
            moved = {
                name: _repeat_shares(part[name], shares, batch_size)
                for name, shares in packed.items()
            }
            if index in moved:
                moved[index] = _renumbered(moved[index], packed[index], batch_size)
            return _rebuild_mapping(part, _rebuild(others, resized, path) | moved)
        return _rebuild(part, resized, path)

    return resized(batch, "")


def change_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the same nesting with every tensor replaced by ``change(tensor)``."""
    if isinstance(batch, Tensor):
        return change(batch)
    return _rebuild(batch, lambda part, _: change_tensors(part, change))


def describe_batch(batch: Batch) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every tensor, by its path in the batch.

    >>> describe_batch({"input_ids": torch.zeros(2, 8, dtype=torch.int64)})
    {'input_ids': ((2, 8), 'int64')}

    A single tensor is called ``"batch"``.
    """
    return {
        path or LONE: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for path, tensor in _named_tensors(batch)
    }


def _repeat_shares(tensor: Tensor, shares: list[int], batch_size: int) -> Tensor:
    """Return the rows of ``batch_size`` samples, which begin again where they end."""
    parts = tensor.detach()[: sum(shares)].split(shares)
    chosen = [parts[sample % len(parts)] for sample in range(batch_size)]
    return torch.cat(chosen).requires_grad_(tensor.requires_grad)


def _renumbered(index: Tensor, shares: list[int], batch_size: int) -> Tensor:
    """Return an index of samples whose rows begin again where the samples do."""
    counts = [shares[sample % len(shares)] for sample in range(batch_size)]
    numbers = [sample for sample, count in enumerate(counts) for _ in range(count)]
    return torch.tensor(numbers, dtype=index.dtype).view_as(index)


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _repeat_rows(tensor: Tensor, batch_size: int, dim: int, used: int) -> Tensor:
    """Cut or repeat along one dimension into a storage of exactly the new size."""
    if batch_size == used == tensor.shape[dim]:
        return tensor
    source = tensor.detach().narrow(dim, 0, used)
    if batch_size > used:
        # cat rather than index_select: an index would have to be fake where the
        # tensor is, and channels_last survives.
        copies = -(-batch_size // used)
        source = torch.cat([source] * copies, dim=dim)
    if batch_size <= used or source.shape[dim] != batch_size:
        source = source.narrow(dim, 0, batch_size).clone()
    return source.requires_grad_(tensor.requires_grad)


def _children(part: Batch) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container; None for a leaf."""
    if isinstance(part, PackedSequence):
        raise InputError(
            "A PackedSequence has no batch dimension. Pass the padded tensor and pack "
            "it inside the model's forward."
        )
    return children_of(part)


def _named_tensors(part: Batch, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield path, part
        return
    for name, child in _children(part) or ():
        yield from _named_tensors(child, join(path, name))


def _rebuild(
    part: Batch, change: Callable[[Batch, str], Batch], path: str = ""
) -> Batch:
    """Return a container of the same type with changed children; leaves as they are.

    ``change`` is called with each child and its path, below ``path``.
    """
    children = _children(part)
    if children is None:
        return part
    values = [change(child, join(path, name)) for name, child in children]
    if isinstance(part, Mapping):
        return _rebuild_mapping(part, dict(zip(part, values, strict=True)))
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*values)
    if isinstance(part, (list, tuple)):
        return type(part)(values)
    names = [name for name, _ in children]
    return dataclasses.replace(part, **dict(zip(names, values, strict=True)))


def _rebuild_mapping(part: Mapping[Any, Any], values: dict[Any, Any]) -> Batch:
    # A copy keeps what a constructor would want again: BatchEncoding's tokenizer
    # output, defaultdict's factory.
    result = copy.copy(part)
    if not hasattr(result, "__setitem__"):
        return values
    for key, value in values.items():
        result[key] = value
    return result
