"""``copy.deepcopy`` of a model, including ``__slots__`` and deeply linked objects."""

import contextlib
import copy
import copyreg
import functools
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

_CONTAINERS: Final = frozenset({OrderedDict, dict, list, set})
_PLAIN: Final = frozenset({type(None), bool, int, float, str})
# What decides how ``deepcopy`` copies an object, or works on copies without attributes.
_COPY_METHODS: Final = (
    *("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__", "__new__", "__hash__", "__eq__"),
)
_DEEPEST: Final = 50_000  # recursion limit; deepcopy takes about four frames per link


def deepcopy_model(model: _T, memo: dict[int, Any]) -> _T:
    """Deep-copy a model, including the ``__slots__`` of its modules."""
    # The recursion limit is raised meanwhile, for long linked lists.
    modules = list(_copied_modules(model, memo))
    _copy_empty_containers(modules, memo)
    with _deeper_recursion():
        _copy_ordinary_modules(modules, memo)
        clone = copy.deepcopy(model, memo)
        _copy_slots(modules, memo)
    return clone


def _copied_modules(model: object, memo: Mapping[int, object]) -> Iterator[object]:
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
    """Copy the empty containers of modules, most of which hold no hooks."""
    # ``deepcopy`` takes ten times as long for an empty ``OrderedDict``.
    for module in modules:
        for value in vars(module).values():
            kind = type(value)
            if kind in _CONTAINERS and not value and id(value) not in copies:
                copies[id(value)] = kind()


def _copy_ordinary_modules(modules: Sequence[object], copies: dict[int, Any]) -> None:
    """Copy modules that ``deepcopy`` would copy attribute by attribute."""
    # It takes several times as long, because it looks up how to copy each of the twenty
    # attributes that every module has.
    for module in reversed(modules):  # children first
        kind: Any = type(module)
        if (
            id(module) in copies  # another one led to it
            or not _is_ordinary(kind)
            or "__deepcopy__" in vars(module)
        ):
            continue
        clone = copies[id(module)] = kind.__new__(kind)
        state = {
            name: value
            if type(value) in _PLAIN
            else copies[id(value)]
            if id(value) in copies
            else copy.deepcopy(value, copies)
            for name, value in vars(module).items()
        }
        clone.__setstate__(state)


@functools.cache
def _is_ordinary(kind: object) -> bool:
    """Whether a module class says nothing itself about how it is copied."""
    plain: Any = sys.modules["torch"].nn.Module
    same = (
        getattr(kind, name, None) is getattr(plain, name, None)
        for name in _COPY_METHODS
    )
    return all(same) and not _slots_of(kind) and kind not in copyreg.dispatch_table


def _copy_slots(modules: Iterable[object], copies: Mapping[int, object]) -> None:
    """Copy the ``__slots__`` of modules; ``copies``: the memo of ``deepcopy``."""
    for module in modules:
        kind: Any = type(module)
        slots = _slots_of(kind)
        clone = copies.get(id(module))
        for name in slots:
            if clone is not None and hasattr(module, name) and not hasattr(clone, name):
                setattr(clone, name, copy.deepcopy(getattr(module, name), dict(copies)))


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for parent in kind.__mro__
        for slots in [parent.__dict__.get("__slots__", ())]
        for name in ((slots,) if isinstance(slots, str) else slots)
    )
