"""ValueHash: hash Python objects with everything in them that can change a trace.

Objects of unknown kinds raise, so that equal hashes mean equal traces. Different hashes
of equal objects only cost one more trace.
"""

import contextlib
import enum
import functools
import hashlib
import logging
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from budgetfit.traces.cache.code_hash import (
    NotCacheableError,
    add_class,
    add_function,
    cached_function,
    is_builtin,
)
from budgetfit.utils.user_code import is_library

ValuePolicy: TypeAlias = Literal["none", "integers", "all"]
# Hashed by their ``repr``, which identifies a value among those of its type.
_SCALARS: Final = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    type(NotImplemented),
    range,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.dtype,
    re.Pattern,
    PurePath,
)
# Types that are hashed by the attributes named here.
_PARTS: Final = (
    (types.MethodType, "__func__"),
    (types.MethodType, "__self__"),
    (staticmethod, "__func__"),
    (classmethod, "__func__"),
    (functools.cached_property, "func"),
    (property, "fget"),
    (property, "fset"),
    (property, "fdel"),
    (functools.partial, "func"),
    (functools.partial, "args"),
    (functools.partial, "keywords"),
    (logging.Logger, "name"),
    (types.GenericAlias, "__origin__"),
    (types.GenericAlias, "__args__"),
    (types.UnionType, "__args__"),
)
_MADE_OF_PARTS: Final = tuple({kind for kind, _ in _PARTS})
_TENSORS: Final = (torch.Tensor, nn.Parameter, nn.Buffer)
_MOST_VALUE_BYTES: Final = 2**26
_POINTER_BYTES: Final = 8
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
# Attributes of a module that are hashed separately, or only concern its state dict.
_BOOKKEEPING: Final = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)
# Of transformers' GenerationConfig: a string hash, different in every process.
_PER_PROCESS: Final = frozenset({"_original_object_hash"})
# Empty in a module without hooks.
_HOOKS: Final = frozenset(
    {
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    }
)


class ValueHash:
    """A hash of all values that are added.

    Attributes:
        values: Which tensors are hashed with their values and not only their metadata:
            integers in a batch (floats become fake), all in a function's closure (they
            stay real).
    """

    def __init__(self, values: ValuePolicy = "all") -> None:
        self.values = values
        self._hash = hashlib.sha256()
        self._value_bytes = 0
        self._tokens: set[str] = set()
        self._seen: dict[tuple[int, ValuePolicy], int] = {}
        self._storages: dict[int, int] = {}
        self._alive: list[object] = []  # an id is reused once its object is gone

    def hexdigest(self) -> str:
        """Return the hash of all that was added."""
        return self._hash.hexdigest()

    def add(self, *values: Any) -> None:
        """Add values to the hash, unless something in them is of an unknown kind."""
        for value in values:
            try:
                self._add(value)
            except RecursionError:
                raise NotCacheableError(type(value).__qualname__) from None

    def _write(self, kind: str, text: bytes = b"") -> None:
        self._hash.update(b"%s %d:%s" % (kind.encode(), len(text), text))

    def _add(self, value: object) -> None:
        if isinstance(value, enum.Enum):
            self._write("enum", f"{type(value).__qualname__}.{value.name}".encode())
            self.add_once(type(value), add_class)
        elif isinstance(value, _SCALARS):
            text = repr(value).encode("utf-8", "backslashreplace")
            self._write(type(value).__qualname__, text)
        elif isinstance(value, torch.Tensor):
            self.add_once(value, ValueHash._add_tensor)
        elif isinstance(value, tuple):
            self._add_container(value)
        elif isinstance(value, (list, Mapping)):
            self.add_once(value, ValueHash._add_container)
        elif isinstance(value, (set, frozenset)):
            self._add_set(value)
        elif isinstance(value, (np.ndarray, np.generic)):
            self._add_array(np.asarray(value))
        elif isinstance(value, nn.Module):
            self.add_once(value, ValueHash._add_module)
        else:
            self._add_code_or_object(value)

    def first_seen(self, token: str) -> bool:
        """Whether ``token`` was not asked for before."""
        new = token not in self._tokens
        self._tokens.add(token)
        return new

    def add_once(self, value: object, add: Callable[[Any, Any], None]) -> None:
        """Hash an object at its first occurrence, and a number at later ones."""
        key = (id(value), self.values)
        number = self._seen.get(key)
        if number is not None:
            self._write("again", str(number).encode())
            return
        self._seen[key] = len(self._seen)
        self._alive.append(value)
        self._write("object")
        add(self, value)

    def _add_container(self, value: Collection[Any]) -> None:
        kind = type(value)
        self._write("container", f"{kind.__module__}.{kind.__qualname__}".encode())
        self._write("length", str(len(value)).encode())
        if not is_library(kind.__module__):
            self.add_once(kind, add_class)
        if isinstance(value, Mapping):
            for key, content in value.items():
                self.add(key, content)
            if hasattr(value, "default_factory"):
                self.add(value.default_factory)
        else:
            self.add(*value)

    def _add_set(self, value: Collection[object]) -> None:
        """Hash a set in sorted order: its own differs between processes."""
        digests = []
        for content in value:
            if not isinstance(content, (*_SCALARS, tuple, frozenset, type)):
                raise NotCacheableError(f"a set of {type(content).__qualname__}")
            one = ValueHash()
            one.add(content)
            digests.append(one.hexdigest())
        self._write("set", repr(sorted(digests)).encode())

    def _add_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.hasobject:
            raise NotCacheableError(f"an array of {array.dtype}")
        self._count(array.nbytes)
        self._write("array", f"{array.dtype.str}{array.dtype.fields}".encode())
        self._write("shape", repr((array.shape, array.strides)).encode())
        self._write("values", array.tobytes())

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in _TENSORS or tensor.layout != torch.strided:
            raise NotCacheableError(f"a {type(tensor).__qualname__}")
        if tensor._backward_hooks or getattr(  # noqa: SLF001 - no public name
            tensor, "_post_accumulate_grad_hooks", None
        ):
            raise NotCacheableError("a tensor with hooks")
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        shared = self._storages.setdefault(storage._cdata, len(self._storages))  # noqa: SLF001
        on_meta = tensor.device.type == "meta"
        metadata = (
            type(tensor).__name__,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            str(tensor.dtype),
            tensor.requires_grad,
            tensor.is_leaf and tensor.grad is not None,  # torch warns at others
            on_meta,
            shared,
        )
        self._write("tensor", repr(metadata).encode())
        # Traces propagate the values of integers; of other tensors they use no values.
        is_integer = not tensor.is_floating_point() and not tensor.is_complex()
        if not on_meta and (
            self.values == "all" or (self.values == "integers" and is_integer)
        ):
            self._count(tensor.nbytes)
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            self._write("values", flat.view(torch.uint8).numpy().tobytes())

    def _count(self, value_bytes: int) -> None:
        self._value_bytes += value_bytes
        if self._value_bytes > _MOST_VALUE_BYTES:
            raise NotCacheableError(f"values of {self._value_bytes} bytes")

    def _add_module(self, module: nn.Module) -> None:
        """Hash a module, its children, attributes, parameters and buffers."""
        self.add(type(module))
        for name, content in vars(module).items():
            if name in _HOOKS:
                if content:
                    raise NotCacheableError(f"{type(module).__qualname__}.{name}")
            elif name not in _BOOKKEEPING:
                self.add(name, content)
        for kind in ("_parameters", "_buffers", "_modules"):
            if content := vars(module)[kind]:
                self.add(kind, dict(content))

    def _add_code_or_object(self, value: Any) -> None:  # noqa: ANN401
        if isinstance(value, type):
            self.add_once(value, add_class)
        elif isinstance(value, types.FunctionType):
            self.add_once(value, _add_function)
        elif isinstance(value, _MADE_OF_PARTS):
            self.add("parts", type(value).__name__)
            names = (name for kind, name in _PARTS if isinstance(value, kind))
            self.add(*(getattr(value, name) for name in names))
        elif cached_function(value) is not None:
            self.add("cached", cached_function(value))
        elif is_builtin(value):
            self.add("builtin", str(getattr(value, "__module__", "")))
            self.add(value.__qualname__)
            owner = getattr(value, "__self__", None)
            self.add(None if isinstance(owner, (type, types.ModuleType)) else owner)
        elif isinstance(value, types.ModuleType) and is_library(value.__name__):
            self.add("module", value.__name__)
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):  # noqa: SLF001
            self.add("op", str(value))
        else:
            self.add_once(value, ValueHash._add_object)

    def _add_object(self, value: object) -> None:
        """Hash an instance of a Python class by its class and its attributes."""
        cls = type(value)
        for base in cls.__mro__[:-1]:
            if not base.__flags__ & _HEAP_TYPE or base.__basicsize__ > _plain_size(
                base
            ):
                raise NotCacheableError(f"a {cls.__module__}.{cls.__qualname__}")
        self.add(cls)
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        self.add(
            {
                name: item
                for name, item in attributes.items()
                if name not in _PER_PROCESS
            }
        )
        for name in _slots(cls):
            self.add(name, getattr(value, name, None))

    @contextlib.contextmanager
    def hashing(self, values: ValuePolicy) -> Iterator[None]:
        """Change which tensors are hashed with their values."""
        before, self.values = self.values, values
        try:
            yield
        finally:
            self.values = before


def _add_function(hasher: ValueHash, function: types.FunctionType) -> None:
    """Hash a function with all values in its closure: these stay real in a trace."""
    with hasher.hashing("all"):
        add_function(hasher, function)


def _plain_size(cls: type) -> int:
    """Return the instance size of a class without state in C."""
    return object.__basicsize__ + _POINTER_BYTES * (2 + len(_slots(cls)))


def _slots(cls: type) -> list[str]:
    return [
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    ]
