"""Restore attributes and globals that a block's forward mutates, for recomputation.

Counters, flags, the state of a recurrent layer, a private generator: as with buffers, a
recomputation must start from the values before the forward, and leave those after it.
"""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from budgetfit.utils.rng_state import (
    generator_state,
    is_generator,
    set_generator_state,
)
from budgetfit.utils.user_code import (
    CONTAINERS,
    holds_same,
    mutated_globals_of_all,
    replace_contents,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_ABSENT: Any = object()
_OTHER: Any = object()  # not kept: may hold the graph of an earlier step
_MAX_ITEMS = 2**12  # larger ones are lookup tables or logs
_OF_TORCH = frozenset(vars(nn.Module()))
_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class AttributeChange(NamedTuple):
    """An attribute or global that a forward has set, and its value before."""

    attributes: dict[str, Any]
    name: str
    before: Any


class GeneratorChange(NamedTuple):
    """A private generator of a module, and its state before a forward."""

    generator: Any
    before: Any


class ContainerChange(NamedTuple):
    """A list, dict or set in an attribute, and its contents before a forward."""

    container: Any
    before: Any


Change: TypeAlias = AttributeChange | GeneratorChange | ContainerChange


class AttributesSnapshot(NamedTuple):
    """State before a forward: attributes by module, generators, containers, globals."""

    attributes: list[dict[str, Any]]
    generators: list[GeneratorChange]
    containers: list[ContainerChange]
    globals: list[AttributeChange]


class MutatedAttributes:
    """Detects which attributes of its modules a block's forward mutates.

    Covers attributes that are set on modules or by ``global`` statements, and contents
    of lists, dicts and sets of numbers and text; not changes inside other objects.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = [item for item in block.modules() if _may_set(item)]
        self._generators = [
            (module, name)
            for module in self._modules
            for name, value in module.__dict__.items()
            if is_generator(value)
        ]
        self._globals = mutated_globals_of_all(map(type, self._modules))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out globals: copies and pickles of a model do not include them."""
        return {**vars(self), "_globals": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the globals from the classes of the copied modules."""
        vars(self).update(state)
        self._globals = mutated_globals_of_all(map(type, self._modules))

    def snapshot(self) -> AttributesSnapshot:
        """Return the state before a forward."""
        own = [module.__dict__.get(name) for module, name in self._generators]
        return AttributesSnapshot(
            [dict(module.__dict__) for module in self._modules],
            [
                GeneratorChange(each, generator_state(each))
                for each in own
                if is_generator(each)
            ],
            [
                ContainerChange(value, value.copy())
                for value in self._containers()
                if _holds_values(value)
            ],
            [
                AttributeChange(places, name, places.get(name, _ABSENT))
                for places, name in self._globals
            ],
        )

    def _containers(self) -> Iterator[Any]:
        for module in self._modules:
            for name, value in module.__dict__.items():
                if type(value) in CONTAINERS and name not in _OF_TORCH:
                    yield value
        for places, name in self._globals:
            if type(value := places.get(name)) in CONTAINERS:
                yield value

    def changes(self, held: AttributesSnapshot) -> list[Change]:
        """Return what a forward may have changed since ``held``."""
        found: list[Change] = [*held.generators]
        found += [
            each
            for each in held.containers
            if not holds_same(each.container, each.before)
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


@contextmanager
def restored_attributes(changes: list[Change]) -> Iterator[None]:
    """Set the values before the forward inside the context, then the current ones."""
    now = [_current(each) for each in changes]
    try:
        for each in changes:
            _set(each, each.before)
        yield
    finally:
        for each, value in zip(changes, now, strict=True):
            _set(each, value)


def _current(each: Change) -> Any:
    if isinstance(each, GeneratorChange):
        return generator_state(each.generator)
    if isinstance(each, ContainerChange):
        return each.container.copy()
    return each.attributes.get(each.name, _ABSENT)


def _set(each: Change, value: Any) -> None:
    if isinstance(each, GeneratorChange):
        set_generator_state(each.generator, value)
    elif isinstance(each, ContainerChange):
        replace_contents(each.container, value)
    elif value is _ABSENT:
        each.attributes.pop(each.name, None)
    elif value is not _OTHER:
        each.attributes[each.name] = value


def _holds_values(container: Any) -> bool:
    """Whether a container has only plain values, which can be kept until backward."""
    if len(container) > _MAX_ITEMS:
        return False
    items = container.values() if isinstance(container, dict) else container
    return set(map(type, items)).issubset(_VALUES)


def _may_set(module: nn.Module) -> bool:
    """Whether a forward may set attributes on it: torch's own layers do not."""
    return (
        not type(module).__module__.startswith("torch.nn.modules.")
        or len(module._forward_pre_hooks) > 0
        or len(module._forward_hooks) > 0
    )


def _keepable(value: Any) -> Any:
    """Return the value, or ``_OTHER`` if it may hold the graph of an earlier step."""
    if value is _ABSENT or isinstance(value, _VALUES):
        return value
    if isinstance(value, tuple) and all(isinstance(item, _VALUES) for item in value):
        return value
    if isinstance(value, torch.Tensor):
        # One with a graph is recomputed by the forward; keeping it would take memory
        # until backward.
        return value if value.grad_fn is None else _OTHER
    return _OTHER
