"""What a call of an op is, but for the values in its tensors: a key to remember it by.

A trace makes the same few hundred calls over and over, and what a call returns, costs
and takes is decided by its arguments' metadata, so each is worked out once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._ops import OpOverload

Key = tuple[Any, ...]
Value = TypeVar("Value")

CPU = torch.device("cpu")
STRIDED = torch.strided
LISTS = frozenset({list, tuple, torch.Size})
# Their values say all.
PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
MOST_CALLS = 1 << 14  # of about two kilobytes each


class Calls(dict[Key, Value]):
    """What is known of calls, and of no more of them than memory is worth."""

    def keep(self, key: Key, value: Value) -> Value:
        """Remember what is known of a call, and return it."""
        if len(self) >= MOST_CALLS:
            self.clear()
        self[key] = value
        return value


def call_key(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *outputs: object
) -> Key | None:
    """Return all that a call's result depends on; None: that is more than metadata."""
    key = [func, torch.get_default_dtype()]
    if not describe(args, key):
        return None
    if kwargs:
        key += kwargs
        if not describe(kwargs.values(), key):
            return None
    if outputs and not describe(outputs, key):
        return None
    return tuple(key)


def describe(values: Iterable[Any], key: list[Any]) -> bool:
    """Add arguments to a key; say whether they are plain, or fakes of a common kind."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if (
                value.constant is not None
                or value.layout is not STRIDED
                or value.fake_device != CPU
                or value.is_inference()
            ):
                return False
            key += (
                value.shape,
                value.stride(),
                value.dtype,
                value.storage_offset(),
                value.requires_grad,
                value.is_conj(),
                value.is_neg(),
            )
        elif kind in PLAIN:
            key += (kind, value)  # 1 and 1.0 are equal
        elif kind in LISTS:
            key += (kind, len(value))
            if not describe(value, key):
                return False
        else:
            return False
    return True
