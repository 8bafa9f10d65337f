"""Attributes that a block's forward changes, when the block runs a second time.

Counters, flags, the state of a recurrent layer, a generator of one's own: as with
buffers, a recomputation must find what its forward found, and leave what it left.
"""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from budgetfit.core.random_generators import (
    generator_state,
    is_generator,
    set_generator_state,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_ABSENT: Any = object()
_OTHER: Any = object()  # may hold a graph, and with it the step before, and so on
_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class Changed(NamedTuple):
    """An attribute that a forward has set, and what it was before."""

    attributes: dict[str, Any]
    name: str
    before: Any


class Drawn(NamedTuple):
    """A generator of a module's own, and its state before a forward."""

    generator: Any
    before: Any


class WrittenAttributes:
    """Finds out what a block's forward changes of the attributes of its modules.

    Seen is what is set, not what is changed inside: a list that grows.

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

    def hold(self) -> tuple[list[dict[str, Any]], list[Drawn]]:
        """Note what the forward finds."""
        own = [module.__dict__.get(name) for module, name in self._generators]
        return (
            [dict(module.__dict__) for module in self._modules],
            [Drawn(each, generator_state(each)) for each in own if is_generator(each)],
        )

    def changes(
        self, held: tuple[list[dict[str, Any]], list[Drawn]]
    ) -> list[Changed | Drawn]:
        """Return what the forward may have changed since ``held``."""
        found: list[Changed | Drawn] = [*held[1]]
        for module, before in zip(self._modules, held[0], strict=True):
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
def attributes_as_before(changes: list[Changed | Drawn]) -> Iterator[None]:
    """Let the forward find what it found, and leave at the end what is there now."""
    now = [
        generator_state(each.generator)
        if isinstance(each, Drawn)
        else each.attributes.get(each.name, _ABSENT)
        for each in changes
    ]
    try:
        for each in changes:
            _put(each, each.before)
        yield
    finally:
        for each, value in zip(changes, now, strict=True):
            _put(each, value)


def _put(each: Changed | Drawn, value: Any) -> None:  # noqa: ANN401
    if isinstance(each, Drawn):
        set_generator_state(each.generator, value)
    elif value is _ABSENT:
        each.attributes.pop(each.name, None)
    elif value is not _OTHER:
        each.attributes[each.name] = value


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
