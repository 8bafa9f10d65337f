"""``copy.deepcopy`` of a model, including ``__slots__`` and deeply linked objects."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_CONTAINERS: Final = frozenset({OrderedDict, dict, list, set})
_DEEPEST: Final = 50_000  # recursion limit; deepcopy takes about four frames per link


def deepcopy_model(model: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - an nn.Module
    """Deep-copy a model, including the ``__slots__`` of its modules.

    The recursion limit is raised meanwhile, for long linked lists.
    """
    modules = list(_copied_modules(model, memo))
    _copy_empty_containers(modules, memo)
    with _deeper_recursion():
        clone = copy.deepcopy(model, memo)
        _copy_slots(modules, memo)
    return clone


def _copied_modules(model: Any, memo: Mapping[int, Any]) -> Iterator[Any]:  # noqa: ANN401
    """Yield the modules of a model without those in the memo and what is in these."""
    seen = set(memo)
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting += vars(module)["_modules"].values()


@contextlib.contextmanager
def _deeper_recursion() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _copy_empty_containers(modules: Iterable[object], copies: dict[int, Any]) -> None:
    """Copy the empty containers of modules, most of which hold no hooks.

    ``deepcopy`` takes ten times as long for an empty ``OrderedDict``.
    """
    for module in modules:
        for value in vars(module).values():
            kind = type(value)
            if kind in _CONTAINERS and not value and id(value) not in copies:
                copies[id(value)] = kind()


def _copy_slots(modules: Iterable[Any], copies: Mapping[int, Any]) -> None:
    """Copy the ``__slots__`` of modules.

    Args:
        modules: Read only.
        copies: The ``deepcopy`` memo: ``id`` of an object -> its copy.
    """
    for module in modules:
        kind: Any = type(module)
        slots = _slots_of(kind)
        clone = copies.get(id(module))
        for name in slots:
            if clone is not None and hasattr(module, name) and not hasattr(clone, name):
                setattr(clone, name, copy.deepcopy(getattr(module, name), dict(copies)))


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 - a class
    return tuple(
        name
        for parent in kind.__mro__
        for name in _as_names(parent.__dict__.get("__slots__", ()))
    )


def _as_names(slots: Any) -> tuple[str, ...]:  # noqa: ANN401 - text, or several
    return (slots,) if isinstance(slots, str) else tuple(slots)
