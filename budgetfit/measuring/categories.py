"""Memory by category at the peak: counted on real objects, and compared.

Categories are parameters, buffers, gradients and optimizer state; all else is one row.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.core.verification import CategoryCheck

# The rounding of CUDA's caching allocator (kMinBlockSize).
_CUDA_BLOCK_BYTES: Final = 512
REST = "activations and the rest"
REST_WITH_GRADIENTS = "gradients, activations, the rest"


def category_checks(
    timeline: MemoryTimeline,
    counted: Mapping[str, int],
    measured_peak_bytes: int,
    ranks: int = 1,
) -> tuple[CategoryCheck, ...]:
    """Return a row for each category that can be counted, and one for the rest.

    Gradients are counted once all exist, so that they are a row only where the
    predicted peak is later; else they are in the rest. Activations at the peak cannot
    be counted: they are in the rest.

    ``counted``: bytes of ``parameters``, ``buffers``, ``gradients`` and
    ``optimizer_state`` on the device. ``measured_peak_bytes``: allocated on CUDA, live
    on a CPU; -1 if not measured. On several ``ranks`` the gradients of a rank exist
    once all are reduced.
    """
    predicted = timeline.at_peak_bytes
    if not predicted or not counted or measured_peak_bytes < 0:
        return ()
    names = list(_complete(timeline, ranks))
    rows = [
        CategoryCheck(
            name=name,
            predicted_bytes=predicted.get(name, 0),
            measured_bytes=counted.get(name, 0),
        )
        for name in names
    ]
    rows = [row for row in rows if row.predicted_bytes or row.measured_bytes]
    rows.append(
        CategoryCheck(
            name=REST if "gradients" in names else REST_WITH_GRADIENTS,
            predicted_bytes=timeline.allocated_bytes
            - sum(row.predicted_bytes for row in rows),
            measured_bytes=measured_peak_bytes
            - sum(row.measured_bytes for row in rows),
        )
    )
    return tuple(rows)


def _complete(timeline: MemoryTimeline, ranks: int) -> Iterator[str]:
    """Yield the categories whose tensors all exist at the predicted peak."""
    yield "parameters"
    yield "buffers"
    peak = timeline.points[timeline.peak]
    if peak.phase == "optimizer" or (peak.micro_step > 0 and ranks == 1):
        yield "gradients"
    if peak.step > 0:  # the first step creates the state
        yield "optimizer_state"


def model_bytes(model: nn.Module, device: torch.device) -> dict[str, int]:
    """Return the bytes of the model's parameters and buffers on a device."""
    # A shared storage counts once; on CUDA sizes are rounded to allocator blocks.
    seen: set[int] = set()
    found = {
        "parameters": _bytes_of(model.parameters(), device, seen),
        "buffers": _bytes_of(model.buffers(), device, seen),
    }
    return {name: size for name, size in found.items() if size}


def gradient_bytes(model: nn.Module, device: torch.device) -> int:
    """Return the bytes of all existing gradients."""
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
        key = storage._cdata  # noqa: SLF001 - identity of the storage, not its address
        if key in seen:
            continue
        seen.add(key)
        size = storage.nbytes()
        if device.type == "cuda":
            size = -(-size // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES
        total += size
    return total


def _strided(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors; of a DTensor the part that this rank holds."""
    # Of a sparse gradient its indices and values, of torchao's states those within.
    for whole in tensors:
        tensor = getattr(whole, "_local_tensor", whole)
        if tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())  # noqa: SLF001 - coalesced or not
        elif is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _strided(getattr(tensor, name) for name in names)
        else:
            yield tensor
