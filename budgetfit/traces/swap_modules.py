"""Replace the modules inside an arbitrary object (a loss closure), by copying it.

Searched are containers, instances of the user's classes, bound arguments, and the
closures, defaults and globals of the user's functions. Each object is visited and
copied once: object graphs may have cycles.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from budgetfit.utils.user_code import is_library, referenced_globals

if TYPE_CHECKING:
    Swap = Callable[[nn.Module], nn.Module]

_T = TypeVar("_T")

_IMMUTABLE = (tuple, functools.partial, types.MethodType)


def modules_in(value: object) -> tuple[nn.Module, ...]:
    """Return the outermost modules with tensors that a value holds."""
    return _ObjectGraph(value).modules


def trainable_tensors_in(value: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors outside of modules that a value holds and that can train."""
    return _ObjectGraph(value).trainable


def replace_modules(value: _T, swap: Swap) -> _T:
    """Return a copy of a value with its modules replaced; the value if all stay."""
    reached = _ObjectGraph(value)
    pairs = [(module, swap(module)) for module in reached.modules]
    new = {id(old): other for old, other in pairs if other is not old}
    return _Copies(reached.leading_to(new), new).of(value)


class _ObjectGraph:
    """The objects reachable from a value, up to modules.

    Attributes:
        modules: Those with tensors; nothing inside them is visited.
        trainable: Tensors that require a gradient and are nobody's result.
    """

    def __init__(self, value: object) -> None:
        self._objects = {id(value): value}  # kept alive, so that ids stay theirs
        self._holders: dict[int, list[int]] = {}
        self.modules: tuple[nn.Module, ...] = ()
        self.trainable: tuple[torch.Tensor, ...] = ()
        waiting = deque([value])
        while waiting:
            holder = waiting.popleft()
            if isinstance(holder, nn.Module):
                self.modules += (holder,) if _has_tensors(holder) else ()
                continue
            if isinstance(holder, torch.Tensor):
                if holder.requires_grad and holder.is_leaf:
                    self.trainable += (holder,)
                continue
            for item in _held_by(holder):
                self._holders.setdefault(id(item), []).append(id(holder))
                if id(item) not in self._objects:
                    self._objects[id(item)] = item
                    waiting.append(item)

    def leading_to(self, ends: Collection[int]) -> list[Any]:
        """Return the objects on the paths to those with the given ids."""
        found = set(ends)
        waiting = list(ends)
        while waiting:
            new = set(self._holders.get(waiting.pop(), ())) - found
            found |= new
            waiting += new
        return [self._objects[each] for each in found.difference(ends)]


class _Copies:
    """Copies of objects that refer to replaced ones.

    Args:
        originals: To copy; other objects that they refer to are shared.
        new: Replacements, by the id of the object.
    """

    def __init__(self, originals: Iterable[Any], new: Mapping[int, Any]) -> None:
        self._new = dict(new)
        rows = list(originals)
        self._immutable = {id(each) for each in rows if type(each) in _IMMUTABLE}
        fillable = [each for each in rows if type(each) not in _IMMUTABLE]
        # A function is made with its cells, so these are there first.
        fillable.sort(key=lambda each: not isinstance(each, types.CellType))
        for each in fillable:
            self._new[id(each)] = self._unfilled(each)
        for each in fillable:
            self._fill(self._new[id(each)], each)

    def of(self, value: _T) -> _T:
        """Return the replacement of a value, or itself."""
        if id(value) in self._immutable and id(value) not in self._new:
            self._new[id(value)] = self._rebuilt(value)
        return self._new.get(id(value), value)

    def _rebuilt(self, value: Any) -> object:  # noqa: ANN401
        if isinstance(value, functools.partial):
            args, keywords = self.of(value.args), self.of(value.keywords)
            return functools.partial(self.of(value.func), *args, **keywords)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__))
        return tuple(self.of(item) for item in value)

    def _unfilled(self, value: object) -> object:
        if type(value) in (list, dict, types.CellType):
            return type(value)()
        if not isinstance(value, types.FunctionType):
            return copy.copy(value)
        cells = value.__closure__
        function = types.FunctionType(
            value.__code__,
            dict(value.__globals__),
            value.__name__,
            closure=None if cells is None else tuple(self.of(cell) for cell in cells),
        )
        function.__dict__.update(value.__dict__)
        return function

    def _fill(self, new: Any, old: Any) -> None:  # noqa: ANN401
        if type(old) is list:
            new.extend(self.of(item) for item in old)
        elif type(old) is dict:
            new.update((key, self.of(item)) for key, item in old.items())
        elif isinstance(old, types.CellType):
            new.cell_contents = self.of(old.cell_contents)
        elif isinstance(old, types.FunctionType):
            new.__globals__.update(
                (n, self.of(item)) for n, item in referenced_globals(old)
            )
            new.__defaults__ = self.of(old.__defaults__)
            new.__kwdefaults__ = self.of(old.__kwdefaults__)
        else:
            vars(new).update((n, self.of(item)) for n, item in vars(old).items())


def _held_by(value: object) -> Iterable[object]:
    kind = type(value)
    if kind in _HELD_BY:
        return _HELD_BY[kind](value)
    if isinstance(value, (type, types.ModuleType)) or is_library(kind.__module__):
        return ()
    return getattr(value, "__dict__", {}).values()


def _held_by_function(function: types.FunctionType) -> Iterator[Any]:
    if is_library(function.__module__ or ""):
        return
    yield from function.__closure__ or ()
    yield from (item for _, item in referenced_globals(function))
    yield function.__defaults__
    yield function.__kwdefaults__


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not bound yet
        return ()


_HELD_BY: dict[type, Callable[[Any], Iterable[Any]]] = {
    list: iter,
    tuple: iter,
    dict: dict.values,
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    types.MethodType: lambda value: (value.__self__,),
    types.CellType: _contents,
    types.FunctionType: _held_by_function,
}


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))
