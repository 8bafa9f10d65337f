"""Cache key of an op call (metadata only, no tensor values), and a bounded cache.

A trace repeats the same few hundred calls, and the metadata of the arguments decides
what a call returns, costs and allocates, so each is computed once.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

CallKey = tuple[Any, ...]
Args = tuple[Any, ...]  # of an op
Kwargs = dict[str, Any]
Value = TypeVar("Value")

CPU = torch.device("cpu")
STRIDED = torch.strided
LIST_TYPES = frozenset({list, tuple, torch.Size})
# Types that are part of the key by value.
PLAIN_TYPES = frozenset(
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
MAX_CACHED_CALLS = 1 << 14  # of about two kilobytes each


class CallCache(dict[CallKey, Value]):
    """A bounded cache: op call -> value; emptied when it is full."""

    def store(self, key: CallKey, value: Value) -> Value:
        """Store and return a value."""
        if len(self) >= MAX_CACHED_CALLS:
            self.clear()
        self[key] = value
        return value


def call_key(
    func: OpOverload, args: Args, kwargs: Kwargs, *outputs: object
) -> CallKey | None:
    """Return the cache key of an op call; None if metadata does not decide it."""
    # What an op calls stands for it: to hash the op itself is a call in Python.
    key = [func._op, torch.get_default_dtype()]
    if not add_metadata(args, key):
        return None
    if kwargs:
        key += kwargs
        if not add_metadata(kwargs.values(), key):
            return None
    if outputs and not add_metadata(outputs, key):
        return None
    return tuple(key)


def add_metadata(values: Iterable[Any], key: list[Any]) -> bool:
    """Append the metadata of values to a key; False if one is of an unknown kind."""
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
        elif kind in PLAIN_TYPES:
            key += (kind, value)  # 1 and 1.0 are equal
        elif kind in LIST_TYPES:
            key += (kind, len(value))
            if not add_metadata(value, key):
                return False
        else:
            return False
    return True
