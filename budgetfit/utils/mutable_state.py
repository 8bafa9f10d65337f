"""Copy and restore, in place, what plain Python objects hold.

Lists, dicts, sets, deques, arrays, random generators, attributes of user objects, and
whatever these lead to. Each object is copied alone and written back alone, so all other
references to it stay valid.
"""

import argparse
import array
import collections
import contextlib
import enum
import functools
import io
import itertools
import operator
import sys
import types
import weakref
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableSequence,
    Sequence,
)
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from budgetfit.utils.rng_state import (
    generator_state,
    is_generator_kind,
    set_generator_state,
)
from budgetfit.utils.user_code import is_library

MAX_ITEMS: Final = 2**12  # larger objects are mostly lookup tables or logs
LARGEST: Final = 2**22  # still larger ones take too long to copy even once
# Of the standard library: objects that are nothing but their attributes.
_NAMESPACES: Final = (
    *(types.SimpleNamespace, argparse.Namespace),
    *(collections.UserDict, collections.UserList),
)


class _Part(NamedTuple):
    """How one kind of contents is copied, written back, compared and looked into."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    same: Callable[[Any, Any], bool]
    items: Callable[[Any], Iterable[Any]]
    size: Callable[[Any], int] = len


class _Kind(NamedTuple):
    """What a class of objects holds.

    Attributes:
        parts: Its contents; a subclass of dict has items and attributes.
        passed: What an immutable object leads to; None if it is mutable.
        is_iterator: Whether its position can neither be read nor set.
    """

    parts: tuple[_Part, ...] = ()
    passed: Callable[[Any], Iterable[Any]] | None = None
    is_iterator: bool = False


class HeldState(NamedTuple):
    """A mutable object and what it held.

    Attributes:
        name: The name of the attribute or global that leads to it.
        parts: The kinds of its contents; none of an iterator.
        contents: One each.
        size: Number of items, the larger of its own and those seen before it.
    """

    name: str
    target: Any
    parts: tuple[_Part, ...]
    contents: tuple[Any, ...]
    size: int

    def has_changed(self) -> bool:
        """Whether it holds something else now; generators count as changed."""
        return any(
            not part.same(before, part.read(self.target))
            for part, before in zip(self.parts, self.contents, strict=True)
        )

    def restore(self) -> None:
        """Write back what it held."""
        for part, before in zip(self.parts, self.contents, strict=True):
            if not part.same(before, part.read(self.target)):
                part.write(self.target, before)

    def items(self) -> Iterator[Any]:
        """Yield the objects that it held."""
        for part, content in zip(self.parts, self.contents, strict=True):
            yield from part.items(content)

    def with_items(self, others: Mapping[int, object]) -> Self:
        """Return it with other items in lists, dicts and attributes, by their ids."""

        def replaced(content: object) -> object:
            if isinstance(content, dict):
                return {key: others.get(id(v), v) for key, v in content.items()}
            if isinstance(content, list):
                return [others.get(id(item), item) for item in content]
            return content

        return self._replace(contents=tuple(map(replaced, self.contents)))


def mutable_state(
    roots: Iterable[tuple[str, object]],
    *,
    classes: Iterable[type] = (),
    limit: int = LARGEST,
) -> Iterator[HeldState]:
    """Yield what named objects hold, and the objects that they lead to.

    Modules of torch and objects of libraries are not looked into.

    ``roots``: objects, with the names of the attributes that they are in. ``classes``:
    those whose attributes may be mutated. Objects larger than ``limit`` are left out,
    and all that come after so many.
    """
    classes = list(classes)
    named = [
        (f"{each.__name__}.{name}", value)
        for each in classes
        for name, value in _read_class(each).items()
    ]
    waiting = [(each.__name__, each, _CLASS) for each in classes]
    waiting += [
        (name, value, kind)
        for name, value in itertools.chain(roots, named)
        if (kind := kind_of(value)) is not None
    ]
    seen: set[int] = set()
    while waiting:
        name, value, kind = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if kind.passed is not None:
            items = kind.passed(value)
        else:
            size = max(len(seen), *(part.size(value) for part in kind.parts), 0)
            if size > limit:
                continue
            contents = tuple(part.read(value) for part in kind.parts)
            held = HeldState(name, value, kind.parts, contents, size)
            yield held
            items = held.items()
        for item in items:
            inner = kind_of(item)
            if inner is not None:
                waiting.append((name, item, inner))


def hold_class(kind: type) -> HeldState:
    """Return the attributes of a class that are values, what these hold left out."""
    return HeldState(kind.__name__, kind, _CLASS.parts, (_read_class(kind),), 0)


def leaves(value: object, *, limit: int | None = None) -> Iterator[Any]:
    """Yield the objects that ``value`` leads to and that are not looked into.

    ``limit``: end after so many that are.
    """
    waiting, seen = [value], set[int]()
    while waiting and (limit is None or len(seen) < limit):
        item = waiting.pop()
        kind = kind_of(item)
        if kind is None or kind.is_iterator:
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            if kind.passed is not None:
                waiting.extend(kind.passed(item))
            for part in kind.parts:
                waiting.extend(part.items(part.read(item)))


def kind_of(value: object) -> _Kind | None:
    """Return how an object's contents are copied; None if it holds no such state."""
    kind: Any = type(value)  # which mypy does not take for hashable
    return kind_of_class(kind)


@functools.cache
def kind_of_class(kind: type) -> _Kind | None:
    """Return how the contents of a class's objects are copied, as ``kind_of``."""
    if issubclass(kind, _stateless()):
        return None
    if kind in _PASSED:
        return _Kind(passed=_PASSED[kind])
    if issubclass(kind, (tuple, frozenset)):
        return _Kind(passed=iter)
    if is_generator_kind(kind):
        return _Kind((_GENERATOR,))
    base = next((part for each, part in _CONTAINERS if issubclass(kind, each)), None)
    parts: tuple[_Part, ...] = () if base is None else (base,)
    is_users = not is_library(kind.__module__)
    if base is not None or is_users or issubclass(kind, _NAMESPACES):
        slots = _slots(kind) if is_users else []
        if slots or kind.__dictoffset__:
            parts += (_attributes(slots),)
        return _Kind(parts) if parts else None
    return _Kind(is_iterator=True) if hasattr(kind, "__next__") else None


def class_attributes(kinds: Iterable[type]) -> list[type]:
    """Return the user's classes among ``kinds`` and their parents that hold values."""
    return list(
        dict.fromkeys(
            parent
            for kind in kinds
            for parent in kind.__mro__
            if not is_library(parent.__module__) and _read_class(parent)
        )
    )


def _stateless() -> tuple[type, ...]:
    """Return classes whose objects hold no state, or one that others look after."""
    torch = sys.modules.get("torch")
    return (
        *(str, bytes, bool, int, float, complex, type, types.ModuleType),
        *(enum.Enum, io.IOBase),
        *((torch.nn.Module, torch.Tensor) if torch is not None else ()),
    )


def _same_items(before: Collection[object], now: Collection[object]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _same_dict(before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    return _same_items(before, now) and all(
        map(operator.is_, before.values(), now.values())
    )


def _write_list(target: list[Any], content: list[Any]) -> None:
    list.__setitem__(target, slice(None), content)


# Methods of the base classes: those of a user's subclass may do more. C code keeps an
# ``OrderedDict`` in two tables, of which ``dict``'s methods would change one.
def _write_dict(target: dict[Any, Any], content: dict[Any, Any]) -> None:
    ordered = isinstance(target, collections.OrderedDict)
    base: Any = collections.OrderedDict if ordered else dict
    base.clear(target)
    for key, value in content.items():
        base.__setitem__(target, key, value)


def _read_dict(target: dict[Any, Any]) -> dict[Any, Any]:
    ordered = isinstance(target, collections.OrderedDict)
    base: Any = collections.OrderedDict if ordered else dict
    return dict(base.items(target))


def _write_set(target: set[Any], content: set[Any]) -> None:
    set.clear(target)
    set.update(target, content)


def _write_deque(target: collections.deque[Any], content: list[Any]) -> None:
    collections.deque.clear(target)
    collections.deque.extend(target, content)


def _write_buffer(target: MutableSequence[Any], content: Iterable[Any]) -> None:
    target[:] = content


def _same_arrays(before: NDArray[Any], now: NDArray[Any]) -> bool:
    if before.dtype.hasobject:
        return _same_items(before.ravel(), now.ravel())
    return bool(before.shape == now.shape and before.tobytes() == now.tobytes())


def _array_items(content: NDArray[Any]) -> Iterable[object]:
    return content.flat if content.dtype.hasobject else ()


def _read_cell(target: types.CellType) -> list[Any]:
    try:
        return [target.cell_contents]
    except ValueError:  # nothing in it yet
        return []


def _write_cell(target: types.CellType, content: list[Any]) -> None:
    del target.cell_contents
    for value in content:
        target.cell_contents = value


def _nothing(_: object) -> Iterable[object]:
    return ()


def _no_size(_: object) -> int:
    return 0


_CONTAINERS: Final[tuple[tuple[type, _Part], ...]] = (
    (list, _Part(list, _write_list, _same_items, iter)),
    (dict, _Part(_read_dict, _write_dict, _same_dict, dict.values)),
    (set, _Part(set, _write_set, operator.eq, iter)),
    (types.CellType, _Part(_read_cell, _write_cell, _same_items, iter, _no_size)),
    (collections.deque, _Part(list, _write_deque, _same_items, iter)),
    (bytearray, _Part(bytes, _write_buffer, operator.eq, _nothing)),
    (
        array.array,
        _Part(lambda target: target[:], _write_buffer, operator.eq, _nothing),
    ),
    (np.ndarray, _Part(np.array, np.copyto, _same_arrays, _array_items, np.size)),
)
_GENERATOR: Final = _Part(
    generator_state,
    set_generator_state,
    operator.is_,  # two reads are never the same object
    _nothing,
    _no_size,
)


def _held_by_function(function: types.FunctionType) -> Iterable[object]:
    """Return what a user's function keeps: closure, defaults and attributes."""
    if is_library(function.__module__ or ""):
        return ()
    defaults = (function.__kwdefaults__ or {}).values()
    held = *(function.__closure__ or ()), *(function.__defaults__ or ()), *defaults
    return (*held, function.__dict__) if function.__dict__ else held


_PASSED: Final[dict[type, Callable[[Any], Iterable[Any]]]] = {
    functools.partial: lambda call: (call.func, *call.args, *call.keywords.values()),
    **dict.fromkeys(
        (types.BuiltinMethodType, types.MethodWrapperType),
        lambda method: (method.__self__,),
    ),
    types.MethodType: lambda method: (method.__self__, method.__func__),
    types.FunctionType: _held_by_function,
    weakref.ReferenceType: lambda reference: (reference(),),
}


def _slots(kind: type) -> list[Any]:
    """Return the attributes that a class keeps in slots, as descriptors."""
    return [
        member
        for parent in kind.__mro__
        if not is_library(parent.__module__) and "__slots__" in vars(parent)
        for member in vars(parent).values()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _attributes(slots: Sequence[Any]) -> _Part:
    """Return how attributes of an object are copied, those in slots included."""

    def read(target: object) -> dict[Any, Any]:
        content = dict(getattr(target, "__dict__", {}))
        for member in slots:
            with contextlib.suppress(AttributeError):  # nothing in it yet
                content[member] = member.__get__(target)
        return content

    def write(target: object, content: dict[Any, Any]) -> None:
        if hasattr(target, "__dict__"):
            target.__dict__.clear()
            target.__dict__.update(
                {key: value for key, value in content.items() if isinstance(key, str)}
            )
        for member in slots:
            if member in content:
                member.__set__(target, content[member])
            else:
                with contextlib.suppress(AttributeError):
                    member.__delete__(target)

    return _Part(read, write, _same_dict, dict.values, _no_size)


def _read_class(target: type) -> dict[str, Any]:
    """Return attributes of a class that are values: no methods, no descriptors."""
    return {
        name: value
        for name, value in vars(target).items()
        if not name.startswith("__") and not hasattr(type(value), "__get__")
    }


def _write_class(target: type, content: dict[str, Any]) -> None:
    for name in _read_class(target).keys() - content.keys():
        type.__delattr__(target, name)
    for name, value in content.items():
        if vars(target).get(name) is not value:
            type.__setattr__(target, name, value)


_CLASS: Final = _Kind(
    (_Part(_read_class, _write_class, _same_dict, dict.values, _no_size),)
)
