"""Attributes and globals that a block's forward changes, when it runs a second time.

Counters, flags, the state of a recurrent layer, a generator of one's own: as with
buffers, a recomputation must find what its forward found, and leave what it left.
"""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from budgetfit.utils.random_generators import (
    generator_state,
    is_generator,
    set_generator_state,
)
from budgetfit.utils.user_code import CONTAINERS, globals_changed_by_any, refill

if TYPE_CHECKING:
    from collections.abc import Iterator

_ABSENT: Any = object()
_OTHER: Any = object()  # may hold a graph, and with it the step before, and so on
_MOST_ITEMS = 2**12  # larger ones are tables that are read, or logs
_OF_TORCH = frozenset(vars(nn.Module()))
_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class Changed(NamedTuple):
    """An attribute or a global that a forward has set, and what it was before."""

    attributes: dict[str, Any]
    name: str
    before: Any


class Drawn(NamedTuple):
    """A generator of a module's own, and its state before a forward."""

    generator: Any
    before: Any


class Filled(NamedTuple):
    """A list, dict or set of an attribute, and what was in it before a forward."""

    container: Any
    before: Any


Change: TypeAlias = Changed | Drawn | Filled


class Held(NamedTuple):
    """What a forward finds: attributes by module, generators, containers, globals."""

    attributes: list[dict[str, Any]]
    drawn: list[Drawn]
    filled: list[Filled]
    globals: list[Changed]


class WrittenAttributes:
    """Finds out what a block's forward changes of the attributes of its modules.

    Seen is what is set, on modules or by ``global`` statements, and what lists, dicts
    and sets of numbers and text hold; not what is changed inside other objects.

    Args:
        block: Whose attributes they are.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = [item for item in block.modules() if _may_set(item)]
        self._generators = [
            (module, name)
            for module in self._modules
            for name, value in module.__dict__.items()
            if is_generator(value)
        ]
        self._globals = globals_changed_by_any(map(type, self._modules))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out globals: they are no part of a copy or a pickle of a model."""
        return {**vars(self), "_globals": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take copied modules; their classes name the globals."""
        vars(self).update(state)
        self._globals = globals_changed_by_any(map(type, self._modules))

    def hold(self) -> Held:
        """Note what the forward finds."""
        own = [module.__dict__.get(name) for module, name in self._generators]
        return Held(
            [dict(module.__dict__) for module in self._modules],
            [Drawn(each, generator_state(each)) for each in own if is_generator(each)],
            [
                Filled(value, value.copy())
                for value in self._containers()
                if _holds_values(value)
            ],
            [
                Changed(places, name, places.get(name, _ABSENT))
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

    def changes(self, held: Held) -> list[Change]:
        """Return what the forward may have changed since ``held``."""
        found: list[Change] = [*held.drawn]
        found += [each for each in held.filled if each.container != each.before]
        found += [
            each._replace(before=_to_put_back(each.before))
            for each in held.globals
            if each.attributes.get(each.name, _ABSENT) is not each.before
        ]
        for module, before in zip(self._modules, held.attributes, strict=True):
            now = module.__dict__
            same = map(operator.is_, now.values(), before.values())
            if len(now) == len(before) and all(same):
                continue
            found += [
                Changed(now, name, _to_put_back(before.get(name, _ABSENT)))
                for name in {**before, **now}
                if now.get(name, _ABSENT) is not before.get(name, _ABSENT)
            ]
        return found


@contextmanager
def attributes_as_before(changes: list[Change]) -> Iterator[None]:
    """Let the forward find what it found, and leave at the end what is there now."""
    now = [_now(each) for each in changes]
    try:
        for each in changes:
            _put(each, each.before)
        yield
    finally:
        for each, value in zip(changes, now, strict=True):
            _put(each, value)


def _now(each: Change) -> Any:  # noqa: ANN401
    if isinstance(each, Drawn):
        return generator_state(each.generator)
    if isinstance(each, Filled):
        return each.container.copy()
    return each.attributes.get(each.name, _ABSENT)


def _put(each: Change, value: Any) -> None:  # noqa: ANN401
    if isinstance(each, Drawn):
        set_generator_state(each.generator, value)
    elif isinstance(each, Filled):
        refill(each.container, value)
    elif value is _ABSENT:
        each.attributes.pop(each.name, None)
    elif value is not _OTHER:
        each.attributes[each.name] = value


def _holds_values(container: Any) -> bool:  # noqa: ANN401
    """Whether what a container holds may wait for backward: no graph, no tensor."""
    if len(container) > _MOST_ITEMS:
        return False
    items = container.values() if isinstance(container, dict) else container
    return set(map(type, items)).issubset(_VALUES)


def _may_set(module: nn.Module) -> bool:
    """Whether a forward may set something on it: torch's own layers do not."""
    return (
        not type(module).__module__.startswith("torch.nn.modules.")
        or len(module._forward_pre_hooks) > 0  # noqa: SLF001 - where a norm computes
        or len(module._forward_hooks) > 0  # noqa: SLF001
    )


def _to_put_back(value: Any) -> Any:  # noqa: ANN401
    """Return what may wait for backward: no graph of the step before."""
    if value is _ABSENT or isinstance(value, _VALUES):
        return value
    if isinstance(value, tuple) and all(isinstance(item, _VALUES) for item in value):
        return value
    if isinstance(value, torch.Tensor):
        # One with a graph was computed by a forward, which computes it again; kept, it
        # would take memory until backward.
        return value if value.grad_fn is None else _OTHER
    return _OTHER
