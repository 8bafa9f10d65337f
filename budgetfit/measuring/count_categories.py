"""Count what real objects take: weights, gradients, optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

# CUDA's caching allocator hands out whole blocks of so many bytes (memory-model A1).
_CUDA_BLOCK_BYTES = 512


def model_bytes(model: nn.Module, device: torch.device) -> dict[str, int]:
    """Return the bytes of the model's parameters and buffers on a device.

    A storage counts once, for what names it first; on CUDA by whole blocks.
    """
    seen: set[int] = set()
    found = {
        "parameters": _bytes_of(model.parameters(), device, seen),
        "buffers": _bytes_of(model.buffers(), device, seen),
    }
    return {name: size for name, size in found.items() if size}


def gradient_bytes(model: nn.Module, device: torch.device) -> int:
    """Return the bytes of all gradients that are there now."""
    gradients = (item.grad for item in model.parameters() if item.grad is not None)
    return _bytes_of(gradients, device, set())


def state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Return the bytes of the optimizer's state on a device."""
    leaves: Iterable[Any] = tree_leaves(list(optimizer.state.values()))
    tensors = (item for item in leaves if isinstance(item, torch.Tensor))
    return _bytes_of(tensors, device, set())


def _bytes_of(
    tensors: Iterable[torch.Tensor], device: torch.device, seen: set[int]
) -> int:
    total = 0
    for tensor in _strided(tensors):
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the storage itself, not where it lies
        if key in seen:
            continue
        seen.add(key)
        size = storage.nbytes()
        if device.type == "cuda":
            size = -(-size // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES
        total += size
    return total


def _strided(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors, and of a sparse gradient the two that it is made of."""
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())  # noqa: SLF001 - coalesced or not
        else:
            yield tensor
