"""One aten call as plain JSON, and back: what the recorder and the test both speak.

A tensor is text: ``float32[8,768]``, with its strides after ``:`` where it is not
contiguous, its place in the storage after ``+`` where it does not begin it, and a ``@``
at the end if it is no device memory. ``=bfloat16`` is a dtype, likewise layouts and
memory formats; ``=device`` is the card. Everything else is itself.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

Make = Callable[[torch.dtype, list[int], list[int], int], torch.Tensor]

DEVICE = "=device"
PATTERN = re.compile(r"(\w+)\[([\d,]*)\](?::([\d,]*))?(?:\+(\d+))?(@?)")


def encode(value: object) -> object:
    """Return a value as JSON-ready data."""
    if isinstance(value, torch.Tensor):
        text = f"{_name(value.dtype)}[{_joined(value.shape)}]"
        if not value.is_contiguous():
            text += f":{_joined(value.stride())}"
        if value.storage_offset():
            text += f"+{value.storage_offset()}"
        return text + "@" * (value.device.type == "cpu")
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return f"={_name(value)}"
    if isinstance(value, torch.device):
        return DEVICE
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(data: object, make: Make, device: str) -> Any:
    """Return the value of JSON data; ``make`` builds the tensors on the device."""
    if isinstance(data, list):
        return [decode(item, make, device) for item in data]
    if isinstance(data, dict):
        return {key: decode(item, make, device) for key, item in data.items()}
    if data == DEVICE:
        return torch.device(device)
    return _value(data, make) if isinstance(data, str) else data


def _value(text: str, make: Make) -> Any:
    if text.startswith("="):
        return getattr(torch, text[1:])
    match = PATTERN.fullmatch(text)
    if match is None:  # a word, like the "tanh" of gelu
        return text
    dtype, shape = getattr(torch, match[1]), _numbers(match[2])
    stride = contiguous(shape) if match[3] is None else _numbers(match[3])
    offset = int(match[4] or 0)
    if match[5]:
        return strided(dtype, shape, stride, offset, "cpu")
    return make(dtype, shape, stride, offset)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(numbers: torch.Size | tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


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
    new = torch.empty if dtype.is_floating_point else torch.zeros
    return new(max(extent, 0), dtype=dtype, device=device).as_strided(
        shape, stride, offset
    )


def op_named(name: str) -> torch._ops.OpOverload:
    """Return ``torch.ops.aten.<packet>.<overload>``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
