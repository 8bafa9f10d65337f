"""Put back what a trace changes in the user's code: globals, caches, attributes.

A forward or a loss may keep tensors outside of its modules: in a dict at module level,
a memo of a decorator, a default argument, an attribute of a class or a function. In a
trace those are fakes, which a real forward would find.
"""

import contextlib
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from torch import nn

from budgetfit.tracing.isolation.lru_caches import LruCache
from budgetfit.utils.mutable_state import (
    LARGEST,
    HeldState,
    hold_class,
    kind_of,
    kind_of_class,
)
from budgetfit.utils.user_code import is_library, names_in, namespaces

MOST_OBJECTS: Final = 2**16  # to look at more takes longer than a small trace
_ABSENT: Final = object()
_OF_TORCH: Final = frozenset({"_parameters", "_buffers", "_modules"})
_MAY_BE_EMPTY: Final = (OrderedDict, dict, list, set)
# What is looked at though it holds no state that is written back.
_CODE: Final = (
    *(types.FunctionType, type, nn.Module, LruCache, staticmethod, classmethod),
    *(property, functools.cached_property),
)


@contextlib.contextmanager
def user_state_preserved(
    *roots: object, never_run: Iterable[object] = ()
) -> Iterator[None]:
    """Restore what the code of modules, functions and objects may have changed.

    That is what their methods and functions name, and what these lead to, as far as it
    is the user's own: not in libraries. What only ``never_run`` leads to is left out.
    """
    found = _Reached(list(roots), seen={id(each): each for each in never_run})
    found.walk()
    try:
        yield
    finally:
        for restore in found.restores:
            restore()


def _restore_name(place: dict[str, Any], name: str, value: object) -> None:
    """Restore a global, or an attribute of a Python module."""
    now = place.get(name, _ABSENT)
    if now is value:
        return
    if value is not _ABSENT:
        place[name] = value
    elif not isinstance(now, types.ModuleType):  # imported: a package's attribute
        del place[name]


def _clear_cache(function: Any, misses: int) -> None:
    """Clear a ``functools.lru_cache`` with more misses: entries are computed again."""
    if function.cache_info().misses > misses:
        function.cache_clear()


@dataclass(slots=True)
class _Reached:
    """What code leads to, and what restores what that held."""

    waiting: list[Any]
    restores: list[Callable[[], None]] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)  # kept alive: ids stay theirs
    names: set[tuple[int, str]] = field(default_factory=set)

    def walk(self) -> None:
        """Look at everything that waits, and at what it leads to."""
        while self.waiting and len(self.seen) < MOST_OBJECTS:
            value = self.waiting.pop()
            if id(value) in self.seen:
                continue
            if isinstance(value, types.FunctionType):
                self._function(value)
            elif isinstance(value, type):
                self._class(value)
            elif isinstance(value, nn.Module):
                self._module(value)
            elif isinstance(value, LruCache):
                self._cache(value)
            elif isinstance(value, (staticmethod, classmethod)):
                self._see(value, value.__func__)
            elif isinstance(value, property):
                self._see(value, value.fget, value.fset)
            elif isinstance(value, functools.cached_property):
                self._see(value, value.func)
            else:
                self._object(value)

    def _see(self, value: object, *next_: object) -> None:
        self.seen[id(value)] = value
        self.waiting += next_

    def _function(self, function: types.FunctionType) -> None:
        self._see(function)
        if is_library(function.__module__ or ""):
            return
        self.waiting += [function.__defaults__, function.__kwdefaults__]
        self.waiting += function.__dict__.values()
        # Held even if it is empty: a function may keep its first result there.
        self.restores.append(_held(function.__dict__).restore)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                value = cell.cell_contents
                self.restores.append(partial(setattr, cell, "cell_contents", value))
                self.waiting.append(value)
        if not is_library(function.__globals__.get("__name__", "")):
            self._globals(function)

    def _globals(self, function: types.FunctionType) -> None:
        """Hold what a function names: globals, attributes of the modules it names."""
        names = names_in(function.__code__)
        for place in namespaces(function):
            for name in names:
                if (id(place), name) not in self.names:
                    self.names.add((id(place), name))
                    value = place.get(name, _ABSENT)
                    self.restores.append(partial(_restore_name, place, name, value))
                    self.waiting.append(value)

    def _cache(self, function: Any) -> None:
        self._see(function)
        if not is_library(function.__module__ or ""):
            self.waiting.append(function.__wrapped__)
            misses = function.cache_info().misses
            self.restores.append(partial(_clear_cache, function, misses))

    def _class(self, kind: type) -> None:
        self._see(kind)
        for parent in kind.__mro__:
            if not is_library(parent.__module__):
                self.seen[id(parent)] = parent
                self.restores.append(hold_class(parent).restore)
                self.waiting += vars(parent).values()

    def _module(self, module: nn.Module) -> None:
        """Look at a module's code. It does not run itself, but what a copy shares."""
        self._see(module, type(module), *module._modules.values())
        for name, value in vars(module).items():
            kind: Any = type(value)
            if (
                _may_lead_on(kind)
                and name not in _OF_TORCH
                and (kind not in _MAY_BE_EMPTY or value)
            ):
                self.waiting.append(value)

    def _object(self, value: object) -> None:
        kind = kind_of(value)
        if kind is None:
            return
        self._see(value, type(value))
        if kind.passed is not None:
            self.waiting += kind.passed(value)
        elif all(part.size(value) <= LARGEST for part in kind.parts):
            held = _held(value)
            self.restores.append(held.restore)
            if held.size <= MOST_OBJECTS:
                self.waiting += held.items()


@functools.cache
def _may_lead_on(kind: Any) -> bool:
    """Whether to look at objects of a class: not at numbers and names of modules."""
    # A model has tens of thousands of these, and each trace looks at all modules.
    return kind_of_class(kind) is not None or issubclass(kind, _CODE)


def _held(value: object) -> HeldState:
    kind: Any = kind_of(value)
    size = max((part.size(value) for part in kind.parts), default=0)
    contents = tuple(part.read(value) for part in kind.parts)
    return HeldState("", value, kind.parts, contents, size)
