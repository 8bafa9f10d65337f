"""Find blocks whose arguments are containers that change, which cannot run again.

A dict, list, set or object among a block's arguments is passed by reference: when the
block ran again in backward, it would find what the whole forward has made of it.
Examples are a dict that every block updates (``state["x"] = ...``), and the list of a
U-Net's skip connections, to which blocks append and from which they pop.
"""

import sys
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

_MAX_ITEMS: Final = 2**12  # looked at in one call's arguments, nearest first
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
# Objects whose attributes are no state of a forward.
_OPAQUE: Final = (
    *(torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType),
    *(types.MethodType, types.BuiltinFunctionType),
)


# Packages whose objects are no state of a forward, or put it back as they repeat it.
_TAKEN_CARE_OF: Final = frozenset({"torch", "builtins", "budgetfit"})


class _Held(NamedTuple):
    """A container, and a shallow copy of its contents before a block's forward."""

    container: Any
    before: Any


class ChangedContainers:
    """Watches the containers among the arguments of a model's blocks.

    It holds them until the forward ends, tensors included, so what it watches says
    nothing about memory.

    Attributes:
        blocks: Module paths of the blocks that were given a container that changed,
            in their forward or between that and the end of the model's.
    """

    def __init__(self) -> None:
        self.blocks: set[str] = set()
        self._held: list[tuple[str, list[_Held]]] = []

    def watch(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Hook a model, which is a copy: the hooks stay."""
        for name in blocks:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._before(name), with_kwargs=True)
            block.register_forward_hook(self._after(name))
        model.register_forward_hook(self._end)

    def _before(self, name: str) -> Any:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._held.append((name, list(_held(args, kwargs))))

        return before

    def _after(self, name: str) -> Any:
        def after(_: nn.Module, _args: Any, _output: Any) -> None:
            last = next(held for each, held in reversed(self._held) if each == name)
            if any(_has_changed(*each) for each in last):
                self.blocks.add(name)

        return after

    def _end(self, _: nn.Module, _args: Any, _output: Any) -> None:
        for name, held in self._held:
            if any(_has_changed(*each, later=True) for each in held):
                self.blocks.add(name)
        self._held = []


def has_container(args: Any, kwargs: Any) -> bool:
    """Whether a call's arguments are or contain something that it could change."""
    return any(
        not isinstance(value, (torch.Tensor, *_PLAIN))
        and next(_held([value], {}), None) is not None
        for value in (*args, *kwargs.values())
    )


def _held(args: Any, kwargs: Any) -> Iterator[_Held]:
    """Yield the containers in a call's arguments, nested ones included."""
    waiting = deque([*args, *kwargs.values()])
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_ITEMS:
        value = waiting.popleft()
        if isinstance(value, (torch.Tensor, *_PLAIN)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (tuple, frozenset)):
            waiting.extend(value)
            continue
        contents = _contents(value)
        if contents is not None:
            yield _Held(value, contents)
            items = contents.values() if isinstance(contents, dict) else contents
            waiting.extend(items)


def _contents(value: Any) -> dict[Any, Any] | list[Any] | set[Any] | None:
    """Return a shallow copy of what a container holds; None for other values."""
    if isinstance(value, dict):
        return dict(value.items())
    if isinstance(value, (list, deque)):
        return list(value)
    if isinstance(value, set):
        return set(value)
    kind = type(value)
    if (
        isinstance(value, _OPAQUE)
        or kind.__module__.partition(".")[0] in _TAKEN_CARE_OF
        or _is_cache(value)
    ):
        return None
    slots = (name for each in kind.__mro__ for name in _slots(each))
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    return attributes or (attributes if hasattr(value, "__dict__") else None)


def _slots(kind: type) -> Iterator[str]:
    """Yield the attributes that a class keeps in slots."""
    for name, member in vars(kind).items():
        if isinstance(member, types.MemberDescriptorType):
            yield name


def _is_cache(value: object) -> bool:
    """Whether it is a generation cache, which checkpointed blocks are not given."""
    library = sys.modules.get("transformers.cache_utils")
    return library is not None and isinstance(value, library.Cache)


def _has_changed(container: Any, before: Any, *, later: bool = False) -> bool:
    """Whether a container holds other items than before."""
    # ``later``: after its block ran. Keys and attributes that are new then do not
    # count: the block did without.
    now = _contents(container)
    if isinstance(before, dict) and isinstance(now, dict):
        if not later and len(now) != len(before):
            return True
        return any(
            key not in now or not _is_same(now[key], value)
            for key, value in before.items()
        )
    if isinstance(before, list) and isinstance(now, list):
        return len(now) != len(before) or not all(map(_is_same, now, before))
    return bool(now != before)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (
        isinstance(one, _PLAIN) and type(one) is type(other) and one == other
    )
