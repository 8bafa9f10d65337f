"""Restore attributes and globals that a block's forward mutates, for recomputation.

Counters, flags, the state of a recurrent layer, a private generator: as with buffers, a
recomputation must start from the values before the forward, and leave those after it.
"""

import functools
import gc
import itertools
import operator
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, get_origin

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from budgetfit.applying.checkpointing.mutated_buffers import (
    MAX_ELEMENTS,
    differs,
    version,
)
from budgetfit.utils.mutable_state import (
    LARGEST,
    MAX_ITEMS,
    HeldState,
    class_attributes,
    kind_of,
    leaves,
    mutable_state,
)
from budgetfit.utils.mutated_globals import mutated_outside
from budgetfit.utils.user_code import function_of, names_in, users_hooks

_ABSENT: Any = object()
_OTHER: Any = object()  # not kept: may hold the graph of an earlier step
# The last: weights that DeepSpeed's ZeRO-3, in a forward, has found that a module takes
# from another one. It gathers them before the module runs, so also when it runs again.
_NOT_OF_BLOCK = frozenset((*vars(nn.Module()), "_external_params"))
_STATISTICS = frozenset(("running_mean", "running_var"))
_PLAIN = frozenset((bool, int, float, complex, str, type(None), torch.dtype))
_WITHOUT_GRAPH = (nn.Module, type, types.FunctionType, types.ModuleType, Enum)


class AttributeChange(NamedTuple):
    """A changed attribute or global, its old value, and the ``copy`` of a tensor."""

    attributes: dict[str, Any]
    name: str
    before: Any
    copy: torch.Tensor | None = None

    @property
    def is_kept(self) -> bool:
        """Whether a recomputation finds the value before."""
        return self.before is not _OTHER


class ContentChange(NamedTuple):
    """An object that a forward has changed, and what it held before.

    Attributes:
        name: The attribute or global that leads to it.
        before: None if that may be the graph of an earlier step.
        copies: Of tensors in it that the forward wrote to, by their ids.
    """

    name: str
    target: Any
    before: HeldState | None
    copies: dict[int, torch.Tensor] = {}  # noqa: RUF012 - never written to

    @property
    def is_kept(self) -> bool:
        """Whether a recomputation finds what it held before."""
        return self.before is not None


Change: TypeAlias = AttributeChange | ContentChange


class _HeldTensor(NamedTuple):
    """A tensor in a container before a forward; a copy if it may be written to."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None

    def is_written(self) -> bool:
        """Whether the forward wrote to it; through ``.data`` if there is a copy."""
        return version(self.tensor) != self.version or differs(self.tensor, self.copy)


class AttributesSnapshot(NamedTuple):
    """State before a forward.

    Attributes:
        contents: What attributes, globals and hooks lead to.
        tensors: Those without gradients in ``contents`` and ``globals``, by their ids.
    """

    attributes: list[dict[str, Any]]
    contents: list[HeldState]
    globals: list[AttributeChange]
    tensors: dict[int, _HeldTensor]

    def iterator(self) -> tuple[str, str] | None:
        """Return the attribute that leads to an iterator, and the iterator's class."""
        for held in self.contents:
            if not held.parts:
                return held.name, type(held.target).__qualname__
        return None


class Settings(NamedTuple):
    """Numbers, text and flags that a forward found in attributes and globals.

    Others may set them before backward: a dropout's ``p``, the weight of a mixup.

    Attributes:
        globals: All of them, with their values.
    """

    places: list[tuple[dict[str, Any], str]]
    values: list[Any]
    globals: list[AttributeChange]

    def changes(self) -> list[Change]:
        """Return those that have another value now."""
        found: list[Change] = [
            AttributeChange(place, name, before)
            for (place, name), before in zip(self.places, self.values, strict=True)
            if place.get(name, _ABSENT) is not before and type(before) in _PLAIN
        ]
        found += [
            each
            for each in self.globals
            if each.attributes.get(each.name, _ABSENT) is not each.before
            and type(each.before) in _PLAIN
        ]
        return found


class MutatedAttributes:
    """Detects which attributes of its modules a block's forward mutates.

    Covers attributes that are set on modules, their classes and Python modules, or by
    ``global`` statements, and the contents of containers, arrays, closures and user
    objects that they and the user's forward hooks lead to; not objects of libraries.

    Attributes:
        outside: Modules outside of the block that its code, hooks or attributes lead
            to, without the modules in these.
        names_statistics: Whether code other than that of norms names running statistics
            (``functional.batch_norm``, torch.ao's fused convolutions).
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._large_change = self._writes_to_tensors = False
        self.find_modules()

    def find_modules(self) -> None:
        """Find what to look at; again where the block was changed."""
        self._is_first = True  # forward since then
        modules = [*self._block.modules()]
        self._inside = [item for item in modules if _may_set(item)]
        self._all = modules
        self._plain: list[tuple[dict[str, Any], str]] = []
        self._count = -1  # of attributes when these were found
        kinds = list(dict.fromkeys(map(type, self._inside)))
        self._hooks = users_hooks(modules)
        held_by_hooks = list(_reached(map(_held_by_hook, self._hooks)))
        others = dict.fromkeys(each for each in held_by_hooks if isinstance(each, type))
        functions = map(function_of, self._hooks)
        self._globals, self._functions, names = mutated_outside(kinds, functions)
        self.names_statistics = not _STATISTICS.isdisjoint(names) or any(
            map(_names_statistics, kinds)
        )
        self._classes = class_attributes(kinds)
        self._classes_of_hooks = class_attributes(others)
        roots = itertools.chain((value for _, value in self._roots()), self._functions)
        reached = *held_by_hooks, *_reached(roots)
        found = [each for each in reached if isinstance(each, nn.Module)]
        inside = set(modules)
        self.outside = [each for each in dict.fromkeys(found) if each not in inside]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was found: copies of a model find it for themselves."""
        kept = ("_block", "_large_change", "_writes_to_tensors")
        return {name: vars(self)[name] for name in kept}

    def snapshot(self, *, every: bool = False) -> AttributesSnapshot:
        """Return the state before a forward.

        ``every``: also of large objects and of tensors in containers, which are left
        out until one has changed.
        """
        limit = LARGEST if every or self._large_change else MAX_ITEMS
        contents = [*mutable_state(self._roots(), classes=self._classes, limit=limit)]
        outside = mutable_state(
            self._roots_outside(), classes=self._classes_of_hooks, limit=limit
        )
        # An iterator there may have other uses.
        contents += [each for each in outside if each.parts]
        set_outside = [
            AttributeChange(places, name, places.get(name, _ABSENT))
            for places, name in self._globals
        ]
        held = itertools.chain(*(each.items() for each in contents))
        return AttributesSnapshot(
            [dict(module.__dict__) for module in (*self._inside, *self.outside)],
            contents,
            set_outside,
            _held_tensors(
                itertools.chain(held, (each.before for each in set_outside)),
                copied=every or self._is_first or self._writes_to_tensors,
            ),
        )

    def _roots(self) -> Iterator[tuple[str, object]]:
        for module in self._inside:
            yield from _attributes_with_state(module)
        for places, name in self._globals:
            yield name, places.get(name)

    def _roots_outside(self) -> Iterator[tuple[str, object]]:
        for module in self.outside:
            yield from _attributes_with_state(module)
        for function in self._functions:
            yield function.__qualname__, function
        for hook in self._hooks:
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            yield name, _held_by_hook(hook)

    def settings(self, held: AttributesSnapshot) -> Settings:
        """Return the numbers, text and flags that a forward found."""
        count = sum(map(len, held.attributes))
        if count != self._count:
            self._count = count
            self._plain = [
                (module.__dict__, name)
                for module in (*self._all, *self.outside)
                for name, value in module.__dict__.items()
                if type(value) in _PLAIN and name not in _NOT_OF_BLOCK
            ]
        values = [place.get(name, _ABSENT) for place, name in self._plain]
        return Settings(self._plain, values, held.globals)

    def changes(self, held: AttributesSnapshot) -> list[Change]:
        """Return what a forward may have changed since ``held``."""
        written = {
            key: each.copy for key, each in held.tensors.items() if each.is_written()
        }
        self._writes_to_tensors |= bool(written)
        self._is_first = False
        copies = {key: copy for key, copy in written.items() if copy is not None}
        contents = [
            each
            for each in held.contents
            if each.has_changed()
            or (copies and any(id(item) in copies for item in each.items()))
        ]
        if any(each.size > MAX_ITEMS // 2 for each in contents):
            self._large_change = True
        found: list[Change] = [
            ContentChange(
                each.name,
                each.target,
                None if any(map(_may_hold_graph, each.items())) else each,
                copies,
            )
            for each in contents
        ]
        found += [
            each._replace(
                before=_keepable(each.before), copy=copies.get(id(each.before))
            )
            for each in held.globals
            if each.attributes.get(each.name, _ABSENT) is not each.before
            or id(each.before) in copies
        ]
        modules = *self._inside, *self.outside
        for module, before in zip(modules, held.attributes, strict=True):
            now = module.__dict__
            same = map(operator.is_, now.values(), before.values())
            if len(now) == len(before) and all(same):
                continue
            found += [
                AttributeChange(now, name, _keepable(before.get(name, _ABSENT)))
                for name in {**before, **now}
                if now.get(name, _ABSENT) is not before.get(name, _ABSENT)
            ]
        return found


def _held_by_hook(hook: object) -> tuple[object, ...]:
    return hook, function_of(hook)  # an object, its method or bound arguments; closure


def _reached(roots: Iterable[object]) -> Iterator[object]:
    return itertools.chain(*(leaves(each, limit=MAX_ITEMS) for each in roots))


def _attributes_with_state(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, value in module.__dict__.items():
        if kind_of(value) is not None and name not in _NOT_OF_BLOCK:
            yield name, value


def _held_tensors(items: Iterable[object], *, copied: bool) -> dict[int, _HeldTensor]:
    return {
        id(item): _HeldTensor(
            item,
            version(item),
            item.detach().clone() if copied and item.numel() <= MAX_ELEMENTS else None,
        )
        for item in items
        if isinstance(item, torch.Tensor)
        and not item.requires_grad
        and item.layout is torch.strided
    }


def leads_to_iterator(block: nn.Module) -> bool:
    """Whether an attribute leads to an iterator, whose position cannot be put back."""
    return MutatedAttributes(block).snapshot(every=True).iterator() is not None


@contextmanager
def restored_attributes(changes: list[Change]) -> Iterator[None]:
    """Set the values before the forward inside the context, then the current ones."""
    attributes = [each for each in changes if isinstance(each, AttributeChange)]
    contents = [each for each in changes if isinstance(each, ContentChange)]
    now = [each.attributes.get(each.name, _ABSENT) for each in attributes]
    # What they lead to as well: a recomputation changes what the forward has added.
    roots = [(each.name, each.target) for each in contents]
    roots += [(each.name, value) for each, value in zip(attributes, now, strict=True)]
    classes = [each.target for each in contents if isinstance(each.target, type)]
    held = list(mutable_state(roots, classes=classes))
    copies = {key: copy for each in contents for key, copy in each.copies.items()}
    copies = {key: copy.clone() for key, copy in copies.items()}
    try:
        for change in contents:
            if change.before is not None:
                change.before.with_items(copies).restore()
        for each in attributes:
            _set(each, each.before if each.copy is None else each.copy.clone())
        yield
    finally:
        for each, value in zip(attributes, now, strict=True):
            _set(each, value)
        for state in held:
            state.restore()


def _set(each: AttributeChange, value: object) -> None:
    if value is _ABSENT:
        each.attributes.pop(each.name, None)
    elif value is not _OTHER:
        each.attributes[each.name] = value


@functools.cache
def _names_statistics(kind: Any) -> bool:
    """Whether methods of a module's class name running statistics, if it is no norm."""
    return not issubclass(kind, _NormBase) and any(
        not _STATISTICS.isdisjoint(names_in(value.__code__))
        for parent in kind.__mro__
        for value in vars(parent).values()
        if isinstance(value, types.FunctionType)
    )


def _may_set(module: nn.Module) -> bool:
    """Whether a forward may set attributes on it: torch's own layers do not."""
    return (
        not type(module).__module__.startswith("torch.nn.modules.")
        or len(module._forward_pre_hooks) > 0
        or len(module._forward_hooks) > 0
    )


def _keepable(value: object) -> object:
    """Return the value, or ``_OTHER`` if it may hold the graph of an earlier step."""
    return _OTHER if value is not _ABSENT and _may_hold_graph(value) else value


def _may_hold_graph(value: object) -> bool:
    """Whether keeping it until backward may keep an earlier step alive."""
    # A tensor with a graph is recomputed by the forward. Of objects of libraries nobody
    # knows what they hold; numbers, text and the like hold nothing, says the collector.
    return any(
        item.grad_fn is not None
        if isinstance(item, torch.Tensor)
        else gc.is_tracked(item)
        and not isinstance(item, _WITHOUT_GRAPH)
        and get_origin(item) is None  # an alias such as list[int]
        for item in leaves(value)
    )
