"""Restore attributes and globals that a block's forward mutates, for recomputation.

Counters, flags, the state of a recurrent layer, a private generator: as with buffers, a
recomputation must start from the values before the forward, and leave those after it.
"""

import gc
import operator
import types
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, get_origin

import torch
from torch import nn

from budgetfit.utils.mutable_state import (
    LARGEST,
    MAX_ITEMS,
    HeldState,
    class_attributes,
    kind_of,
    leaves,
    mutable_state,
)
from budgetfit.utils.mutated_globals import mutated_globals_of_all

_ABSENT: Any = object()
_OTHER: Any = object()  # not kept: may hold the graph of an earlier step
# The last: weights that DeepSpeed's ZeRO-3, in a forward, has found that a module takes
# from another one. It gathers them before the module runs, so also when it runs again.
_NOT_OF_BLOCK = frozenset((*vars(nn.Module()), "_external_params"))
_WITHOUT_GRAPH = (nn.Module, type, types.FunctionType, types.ModuleType, Enum)


class AttributeChange(NamedTuple):
    """An attribute or global that a forward has set, and its value before."""

    attributes: dict[str, Any]
    name: str
    before: Any

    @property
    def is_kept(self) -> bool:
        """Whether a recomputation finds the value before."""
        return self.before is not _OTHER


class ContentChange(NamedTuple):
    """An object that a forward has changed, and what it held before.

    Attributes:
        name: The attribute or global that leads to it.
        target: The object.
        before: None if that may be the graph of an earlier step.
    """

    name: str
    target: Any
    before: HeldState | None

    @property
    def is_kept(self) -> bool:
        """Whether a recomputation finds what it held before."""
        return self.before is not None


Change: TypeAlias = AttributeChange | ContentChange


class AttributesSnapshot(NamedTuple):
    """State before a forward: attributes by module, what they hold, globals."""

    attributes: list[dict[str, Any]]
    contents: list[HeldState]
    globals: list[AttributeChange]

    def iterator(self) -> tuple[str, str] | None:
        """Return the attribute that leads to an iterator, and the iterator's class."""
        for held in self.contents:
            if not held.parts:
                return held.name, type(held.target).__qualname__
        return None


class MutatedAttributes:
    """Detects which attributes of its modules a block's forward mutates.

    Covers attributes that are set on modules and their classes or by ``global``
    statements, and the contents of containers, arrays and user objects that they lead
    to; not objects of libraries.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = [item for item in block.modules() if _may_set(item)]
        self._large_change = False
        self._find_outside()

    def _find_outside(self) -> None:
        kinds = list(dict.fromkeys(map(type, self._modules)))
        self._globals = mutated_globals_of_all(kinds)
        self._classes = class_attributes(kinds)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out globals: copies and pickles of a model do not include them."""
        return {**vars(self), "_globals": (), "_classes": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the globals from the classes of the copied modules."""
        vars(self).update(state)
        self._find_outside()

    def snapshot(self, *, every: bool = False) -> AttributesSnapshot:
        """Return the state before a forward.

        Args:
            every: Also of large objects, which are left out until one has changed.
        """
        limit = LARGEST if every or self._large_change else MAX_ITEMS
        contents = mutable_state(self._roots(), classes=self._classes, limit=limit)
        return AttributesSnapshot(
            [dict(module.__dict__) for module in self._modules],
            list(contents),
            [
                AttributeChange(places, name, places.get(name, _ABSENT))
                for places, name in self._globals
            ],
        )

    def _roots(self) -> Iterator[tuple[str, Any]]:
        for module in self._modules:
            for name, value in module.__dict__.items():
                if kind_of(value) is not None and name not in _NOT_OF_BLOCK:
                    yield name, value
        for places, name in self._globals:
            yield name, places.get(name)

    def changes(self, held: AttributesSnapshot) -> list[Change]:
        """Return what a forward may have changed since ``held``."""
        contents = [each for each in held.contents if each.has_changed()]
        if any(each.size > MAX_ITEMS // 2 for each in contents):
            self._large_change = True
        found: list[Change] = [
            ContentChange(
                each.name,
                each.target,
                None if any(map(_may_hold_graph, each.items())) else each,
            )
            for each in contents
        ]
        found += [
            each._replace(before=_keepable(each.before))
            for each in held.globals
            if each.attributes.get(each.name, _ABSENT) is not each.before
        ]
        for module, before in zip(self._modules, held.attributes, strict=True):
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
    try:
        for change in contents:
            if change.before is not None:
                change.before.restore()
        for each in attributes:
            _set(each, each.before)
        yield
    finally:
        for each, value in zip(attributes, now, strict=True):
            _set(each, value)
        for state in held:
            state.restore()


def _set(each: AttributeChange, value: Any) -> None:
    if value is _ABSENT:
        each.attributes.pop(each.name, None)
    elif value is not _OTHER:
        each.attributes[each.name] = value


def _may_set(module: nn.Module) -> bool:
    """Whether a forward may set attributes on it: torch's own layers do not."""
    return (
        not type(module).__module__.startswith("torch.nn.modules.")
        or len(module._forward_pre_hooks) > 0
        or len(module._forward_hooks) > 0
    )


def _keepable(value: Any) -> Any:
    """Return the value, or ``_OTHER`` if it may hold the graph of an earlier step."""
    return _OTHER if value is not _ABSENT and _may_hold_graph(value) else value


def _may_hold_graph(value: Any) -> bool:
    """Whether keeping it until backward may keep an earlier step alive.

    A tensor with a graph is recomputed by the forward. Of objects of libraries nobody
    knows what they hold; numbers, text and the like hold nothing, says the collector.
    """
    return any(
        item.grad_fn is not None
        if isinstance(item, torch.Tensor)
        else gc.is_tracked(item)
        and not isinstance(item, _WITHOUT_GRAPH)
        and get_origin(item) is None  # an alias such as list[int]
        for item in leaves(value)
    )
