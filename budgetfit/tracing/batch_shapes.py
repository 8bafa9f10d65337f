"""A batch is any nesting of tensors; here its batch size is read and changed.

Mappings (transformers' ``BatchEncoding`` and ``ModelOutput`` among them), tuples, named
tuples, lists, dataclasses and single tensors are understood; anything else in a batch
(numbers, flags, text, None) is handed through untouched.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from budgetfit.core.errors import InputError

# A tensor, or any nesting of containers that hold some.
Batch: TypeAlias = Any


def batch_size_of(batch: Batch, *, batch_dim: int = 0) -> int:
    """Return how many samples a batch holds: the size that most tensors share.

    Where two sizes are equally frequent, that of the first tensor wins.

    Args:
        batch: Batch nesting of tensors; real, meta and fake ones alike.
        batch_dim: The dimension that counts samples; 0 unless the model says otherwise
            (``made_batch.batch_dimension``).

    Raises:
        InputError: No tensor has that dimension, or the batch is empty.
    """
    sizes = Counter(_sizes_in(batch, batch_dim))
    if not sizes:
        raise InputError(
            "The batch holds no tensor with a batch dimension. Pass the tensors that "
            "the model is called with, for example "
            'batch={"input_ids": torch.zeros(2, 128, dtype=torch.long)}.'
        )
    batch_size = sizes.most_common(1)[0][0]
    if batch_size == 0:
        raise InputError(
            "The batch is empty: its tensors have a batch dimension of 0. Pass one "
            "with at least one sample."
        )
    return batch_size


def resize_batch(batch: Batch, batch_size: int, *, batch_dim: int = 0) -> Batch:
    """Return the same batch with ``batch_size`` samples: rows repeated or cut off.

    Values stay valid, because every row is one of the given rows. Images packed patch
    by patch (Qwen's processors) move with their sample. Other tensors whose batch
    dimension differs from the batch's size stay as they are. Resized tensors own
    storages of exactly their size, as those from a data loader do; the given batch is
    not changed.

    Args:
        batch: Batch nesting of tensors; real, meta and fake ones alike. A list with one
            mapping per sample (detection targets) is repeated as a list.
        batch_size: Samples in the result, at least 1.
        batch_dim: The dimension that counts samples.

    Raises:
        InputError: The size is below 1, or ``batch_size_of`` finds none in the batch.
    """
    if batch_size < 1:
        raise InputError(f"A batch needs at least 1 sample, not {batch_size}.")
    old_size = batch_size_of(batch, batch_dim=batch_dim)

    def resized(part: Batch) -> Batch:
        if _is_sample_list(part):
            rows = range(batch_size if len(part) == old_size else len(part))
            return [copy.copy(part[row % len(part)]) for row in rows]
        if isinstance(part, Mapping) and (packed := _packed_rows(part, old_size)):
            others = {name: part[name] for name in part if name not in packed}
            return _rebuild_mapping(
                part,
                _rebuild(others, resized)
                | {
                    name: _repeat_shares(part[name], shares, batch_size)
                    for name, shares in packed.items()
                },
            )
        if not isinstance(part, Tensor):
            return _rebuild(part, resized)
        if part.dim() <= batch_dim or part.shape[batch_dim] != old_size:
            return part
        return _repeat_rows(part, batch_size, batch_dim)

    return resized(batch)


def change_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the same nesting with every tensor replaced by ``change(tensor)``."""
    if isinstance(batch, Tensor):
        return change(batch)
    return _rebuild(batch, lambda part: change_tensors(part, change))


def describe_batch(batch: Batch) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every tensor, by its path in the batch.

    >>> describe_batch({"input_ids": torch.zeros(2, 8, dtype=torch.int64)})
    {'input_ids': ((2, 8), 'int64')}

    A single tensor is called ``"batch"``.
    """
    return {
        path or "batch": (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for path, tensor in _named_tensors(batch)
    }


def _packed_rows(batch: Mapping[Any, Any], batch_size: int) -> dict[str, list[int]]:
    """Return how many rows of a packed tensor belong to each sample, by its name.

    ``*_grid_thw`` holds an image's patches in time, height and width; the patches of
    all images stand below each other, one in a row.
    """
    rows: dict[str, list[int]] = {}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grid, pixels = batch.get(f"{kind}_grid_thw"), batch.get(name)
        if not isinstance(grid, Tensor) or not isinstance(pixels, Tensor):
            continue
        if grid.is_meta or grid.shape[0] % batch_size:
            continue
        patches = grid.prod(dim=-1).view(batch_size, -1).sum(dim=1).tolist()
        if sum(patches) == pixels.shape[0]:
            rows[name] = patches
            rows[f"{kind}_grid_thw"] = [grid.shape[0] // batch_size] * batch_size
    return rows


def _repeat_shares(tensor: Tensor, shares: list[int], batch_size: int) -> Tensor:
    """Return the rows of ``batch_size`` samples, which begin again where they end."""
    parts = tensor.detach().split(shares)
    chosen = [parts[sample % len(parts)] for sample in range(batch_size)]
    return torch.cat(chosen).requires_grad_(tensor.requires_grad)


def _repeat_rows(tensor: Tensor, batch_size: int, batch_dim: int) -> Tensor:
    """Cut or repeat along one dimension into a storage of exactly the new size."""
    old_size = tensor.shape[batch_dim]
    if batch_size == old_size:
        return tensor
    source = tensor.detach()
    if batch_size > old_size:
        # cat rather than index_select: an index would have to be fake where the
        # tensor is, and channels_last survives.
        copies = -(-batch_size // old_size)
        source = torch.cat([source] * copies, dim=batch_dim)
    if source.shape[batch_dim] != batch_size:
        source = source.narrow(batch_dim, 0, batch_size).clone()
    return source.requires_grad_(tensor.requires_grad)


def _is_sample_list(part: Batch) -> bool:
    """Whether a list holds one mapping per sample, as detection targets do."""
    return (
        isinstance(part, list)
        and len(part) > 0
        and all(isinstance(sample, Mapping) for sample in part)
    )


def _sizes_in(part: Batch, batch_dim: int) -> Iterator[int]:
    """Yield what each tensor says the batch size is."""
    if isinstance(part, Tensor):
        if part.dim() > batch_dim:
            yield part.shape[batch_dim]
    elif _is_sample_list(part):
        # Inside, a leading dimension counts boxes and not samples.
        yield len(part)
    else:
        for _, child in _children(part) or ():
            yield from _sizes_in(child, batch_dim)


def _children(part: Batch) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container; None for a leaf."""
    if isinstance(part, PackedSequence):
        raise InputError(
            "A PackedSequence has no batch dimension. Pass the padded tensor and pack "
            "it inside the model's forward."
        )
    if isinstance(part, Mapping):
        return [(str(key), value) for key, value in part.items()]
    if isinstance(part, (list, tuple)):
        return [(str(index), value) for index, value in enumerate(part)]
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return [
            (field.name, getattr(part, field.name))
            for field in dataclasses.fields(part)
            if field.init
        ]
    return None


def _named_tensors(part: Batch, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield path, part
        return
    for name, child in _children(part) or ():
        yield from _named_tensors(child, f"{path}.{name}" if path else name)


def _rebuild(part: Batch, change: Callable[[Batch], Batch]) -> Batch:
    """Return a container of the same type with changed children; leaves as they are."""
    children = _children(part)
    if children is None:
        return part
    values = [change(child) for _, child in children]
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
