"""One aten call as plain JSON, and back: what the recorder and the test both speak.

A tensor is ``{"dtype": "float32", "shape": [...]}`` with ``"stride"`` where it is not
contiguous and ``"offset"`` where it does not begin its storage, ``"host"`` if it is
no device memory at all. Everything else is itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Make = Callable[[torch.dtype, list[int], list[int], int], torch.Tensor]


def encode(value: Any) -> Any:
    """Return a value as JSON-ready data."""
    if isinstance(value, torch.Tensor):
        data = {"dtype": str(value.dtype).split(".")[1], "shape": list(value.shape)}
        if not value.is_contiguous():
            data["stride"] = list(value.stride())
        if value.storage_offset():
            data["offset"] = value.storage_offset()
        if value.device.type == "cpu":
            data["host"] = True
        return data
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).split(".")[1]}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def decode(data: Any, make: Make) -> Any:
    """Return the value of JSON data; ``make`` builds the tensors."""
    if isinstance(data, dict):
        dtype = getattr(torch, data["dtype"])
        if "shape" not in data:
            return dtype
        shape = data["shape"]
        stride = data.get("stride") or contiguous(shape)
        if data.get("host"):
            return strided(dtype, shape, stride, 0, "cpu")
        return make(dtype, shape, stride, data.get("offset", 0))
    if isinstance(data, list):
        return [decode(item, make) for item in data]
    return data


def contiguous(shape: list[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides


def strided(
    dtype: torch.dtype, shape: list[int], stride: list[int], offset: int, device: str
) -> torch.Tensor:
    """Return a tensor in a storage of its own; integers are 0, to be valid indices."""
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    whole = dtype.is_floating_point or dtype.is_complex
    new = torch.empty if whole else torch.zeros
    return new(max(extent, 0), dtype=dtype, device=device).as_strided(
        shape, stride, offset
    )


def op_named(name: str) -> torch._ops.OpOverload:
    """Return ``torch.ops.aten.<packet>.<overload>``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
