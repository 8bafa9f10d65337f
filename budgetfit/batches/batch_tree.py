"""Batch size, resizing and description of batches of nested tensors.

Mappings (also transformers' ``BatchEncoding`` and ``ModelOutput``), tuples, named
tuples, lists, dataclasses and single tensors are supported; other leaves (numbers,
flags, text, None) are passed through.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from budgetfit.batches.packed_rows import PackedRows
from budgetfit.batches.sample_count import (
    children_of,
    count_samples,
    has_entry_per_sample,
    is_list_of_other_items,
    join_path,
    packed_rows,
    sample_dimension,
)
from budgetfit.core.samples.sample_dims import FIRST_DIM, SINGLE_TENSOR, SampleDims
from budgetfit.errors import InputError

# A tensor, or any nesting of containers that hold some.
Batch: TypeAlias = Any


def batch_size_of(batch: Batch, *, dims: SampleDims = FIRST_DIM) -> int:
    """Return the number of samples in a batch (``count_samples``).

    The model (``plain_modules.batch_dimension``) or the user may specify another
    dimension of samples, ``dims``, than the first.

    Raises:
        InputError: No tensor has that dimension, the batch is empty, it contradicts
            ``dims``, or it has nested tensors.
    """
    for path, tensor in named_tensors(batch):  # refuses what has no batch dimension
        if tensor.is_nested:
            raise InputError(
                f"The batch{f' at {path!r}' if path else ''} is a nested tensor, which "
                "is not planned. Use padded samples with a mask: "
                "torch.nested.to_padded_tensor(x, 0.0)."
            )
    batch_size = count_samples(batch, dims)
    if batch_size is None:
        raise InputError(
            f"The batch, a {type(batch).__name__}, holds no tensor with a batch "
            "dimension. Pass the tensors that the model is called with, of a loader "
            "next(iter(loader)); for example "
            'batch={"input_ids": torch.zeros(2, 128, dtype=torch.long)}.'
        )
    if batch_size == 0:
        raise InputError(
            "The batch is empty: its tensors have a batch dimension of 0. Pass one "
            "with at least one sample."
        )
    return batch_size


def has_sparse_tensors(batch: Batch) -> bool:
    """Whether any tensor of a batch is sparse."""
    return any(tensor.layout is not torch.strided for _, tensor in named_tensors(batch))


def resize_batch(
    batch: Batch, batch_size: int, *, dims: SampleDims = FIRST_DIM, of_first: int = 0
) -> Batch:
    """Return the batch with ``batch_size`` samples: rows repeated or cut off.

    Values stay valid, because every row is one of the given rows, each repeated in its
    place: [a, b] becomes [a, a, b]. Rows of boxes, nodes, edges, patches or bags move
    with their sample (``packed_rows.py``). Other tensors with a different batch
    dimension are unchanged. Resized tensors own storages of exactly their size, like
    those of a data loader; the given batch is not modified. ``of_first``: repeat only
    so many of the first samples; 0 for all.

    Raises:
        InputError: The size is below 1, ``batch_size_of`` finds none in the batch, or
            rows cannot be assigned to samples (``packed_rows``).
    """
    if batch_size < 1:
        raise InputError(f"A batch needs at least 1 sample, not {batch_size}.")
    old_size = batch_size_of(batch, dims=dims)
    used = min(of_first or old_size, old_size)
    as_given = list(range(old_size))
    # Each sample is repeated in its place: sorted samples stay sorted, as packed
    # sequences need.
    chosen = (
        as_given[:batch_size]
        if batch_size <= used
        else [place * used // batch_size for place in range(batch_size)]
    )

    def resized(part: Batch, path: str) -> Batch:
        if isinstance(part, Tensor):
            dim = sample_dimension(part, old_size, dims, path)
            return part if dim is None else _repeat_rows(part, dim, chosen)
        if has_entry_per_sample(part, old_size, dims, path):
            rows = [part[row] for row in chosen]
            return type(part)(
                row.detach().clone().requires_grad_(row.requires_grad)
                if isinstance(row, Tensor)
                else copy.copy(row)
                for row in rows
            )
        if is_list_of_other_items(part, dims, path):
            return list(part)
        packed = packed_rows(part, old_size, dims, path)
        if packed:
            others = {name: part[name] for name in part if name not in packed}
            moved = {
                name: _take_rows(part[name], rows, chosen)
                for name, rows in packed.items()
                if chosen != as_given
            }
            return _rebuild_mapping(part, _rebuild(others, resized, path) | moved)
        return _rebuild(part, resized, path)

    return resized(batch, "")


def map_batch(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with every tensor replaced by ``change(tensor)``."""
    return change_tensors(batch, lambda tensor, _: change(tensor))


def change_tensors(
    batch: Batch, change: Callable[[Tensor, str], Tensor], path: str = ""
) -> Batch:
    """Return the batch with every tensor replaced by ``change(tensor, its path)``."""
    if isinstance(batch, Tensor):
        return change(batch, path)
    return _rebuild(
        batch, lambda part, where: change_tensors(part, change, where), path
    )


def describe_batch(batch: Batch) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every tensor, by path in the batch.

    >>> describe_batch({"input_ids": torch.zeros(2, 8, dtype=torch.int64)})
    {'input_ids': ((2, 8), 'int64')}

    A single tensor is called ``"batch"``.
    """
    return {
        path or SINGLE_TENSOR: (tuple(x.shape), str(x.dtype).removeprefix("torch."))
        for path, x in named_tensors(batch)
    }


def _take_rows(tensor: Tensor, rows: PackedRows, chosen: list[int]) -> Tensor:
    taken: Tensor = rows.take(tensor.detach(), chosen)
    return taken.requires_grad_(tensor.requires_grad)


def _repeat_rows(tensor: Tensor, dim: int, chosen: list[int]) -> Tensor:
    """Return the chosen rows of one dimension, in a storage of exactly their size."""
    if chosen == list(range(tensor.shape[dim])):
        return tensor
    # cat rather than index_select: works with fake tensors without a fake index, and
    # keeps channels_last.
    rows = tensor.detach().split(1, dim)
    taken = torch.cat([rows[sample] for sample in chosen], dim=dim)
    return taken.requires_grad_(tensor.requires_grad)


def _children(part: Batch) -> list[tuple[str, Any]] | None:
    """Return the named children of a container; None for a leaf."""
    if isinstance(part, PackedSequence):
        raise InputError(
            "A PackedSequence has no batch dimension. Pass the padded tensor and pack "
            "it inside the model's forward."
        )
    return children_of(part)


def named_tensors(part: Batch, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with its path; a single one's is empty."""
    if isinstance(part, Tensor):
        yield path, part
        return
    for name, child in _children(part) or ():
        yield from named_tensors(child, join_path(path, name))


def _rebuild(
    part: Batch, change: Callable[[Batch, str], Batch], path: str = ""
) -> Batch:
    """Return a container with children changed by ``change(child, path)``."""
    children = _children(part)
    if children is None:
        return part
    values = [change(child, join_path(path, name)) for name, child in children]
    if isinstance(part, Mapping):
        return _rebuild_mapping(part, dict(zip(part, values, strict=True)))
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*values)
    if isinstance(part, (list, tuple)):
        return type(part)(values)
    names = [name for name, _ in children]
    return dataclasses.replace(part, **dict(zip(names, values, strict=True)))


def _rebuild_mapping(part: Mapping[Any, object], values: dict[Any, Any]) -> Batch:
    # A copy keeps constructor arguments: BatchEncoding's tokenizer output,
    # defaultdict's factory.
    result = copy.copy(part)
    if not hasattr(result, "__setitem__"):
        return values
    for key, value in values.items():
        result[key] = value
    return result
