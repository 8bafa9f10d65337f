"""Find what the methods of a user's classes may mutate outside of their objects."""

import contextlib
import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from budgetfit.utils.mutable_state import kind_of
from budgetfit.utils.user_code import is_library, names_in, namespaces

_SUPERS: Final = "__class__"  # that a method closes over for super()


class Mutated(NamedTuple):
    """What functions may mutate: these, and all that they lead to.

    Attributes:
        globals: Globals, and attributes of Python modules: those that are assigned, and
            containers, tensors and other objects. Each with its namespace.
        functions: Functions with a closure, attributes or mutable defaults.
        names: Of globals and attributes in all of this code.
    """

    globals: tuple[tuple[dict[str, Any], str], ...]
    functions: tuple[types.FunctionType, ...]
    names: frozenset[str]


def mutated_outside(
    kinds: Iterable[object], functions: Iterable[object] = ()
) -> Mutated:
    """Return what the methods of classes, and functions, may mutate."""
    # Also the user's functions that these call; no libraries.
    found = *map(_by_methods, dict.fromkeys(kinds)), _mutated_by(functions)
    places = {
        (id(place), name): (place, name)
        for each in found
        for place, name in each.globals
    }
    kept = dict.fromkeys(function for each in found for function in each.functions)
    names = frozenset[str]().union(*(each.names for each in found))
    return Mutated(tuple(places.values()), tuple(kept), names)


@functools.cache
def _by_methods(kind: object) -> Mutated:
    return _mutated_by([kind])


def _mutated_by(code: Iterable[object]) -> Mutated:
    """Return what the user's functions, methods of classes and objects may mutate."""
    # Of an object only its methods count: what it holds is looked at in each forward.
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    seen: dict[Any, bool] = {}  # functions and classes; whether it keeps something
    all_names: set[str] = set()
    waiting = list(code)
    while waiting:
        value = _function_or_class(waiting.pop())
        if value is None or value in seen or is_library(value.__module__ or ""):
            continue
        if isinstance(value, type):
            seen[value] = False
            waiting += [*value.__mro__, *vars(value).values()]
            continue
        waiting += [*_closure(value), *value.__dict__.values()]
        defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
        seen[value] = (
            any(name != _SUPERS for name in value.__code__.co_freevars)
            or len(value.__dict__) > 0
            or any(map(_is_mutable, defaults))
        )
        names, own = names_in(value.__code__), value.__globals__
        all_names |= names
        assigned = {*_assigned(value.__code__, "STORE_ATTR")}
        found |= {
            (id(own), name): (own, name)
            for name in _assigned(value.__code__, "STORE_GLOBAL")
        }
        for place in namespaces(value):
            for name in names & place.keys():
                waiting.append(place[name])
                is_assigned = place is not own and name in assigned
                if is_assigned or _is_mutable(place[name]):
                    found[id(place), name] = place, name
    functions = tuple(each for each, keeps in seen.items() if keeps)
    return Mutated(tuple(found.values()), functions, frozenset(all_names))


def _function_or_class(value: object) -> types.FunctionType | type | None:
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (types.FunctionType, type)):
        return value
    return None if kind_of(value) is None else type(value)


def _closure(function: types.FunctionType) -> list[Any]:
    """Return what it closes over, but for ``super()``."""
    held = []
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        if name != _SUPERS:
            with contextlib.suppress(ValueError):  # nothing in it yet
                held.append(cell.cell_contents)
    return held


def _is_mutable(value: object) -> bool:
    if isinstance(value, types.FunctionType):
        return False  # what it keeps is looked at as its own
    torch = sys.modules.get("torch")
    tensors = () if torch is None else (torch.Tensor, torch.nn.Module)
    return isinstance(value, tensors) or kind_of(value) is not None


def _assigned(code: types.CodeType, instruction: str) -> Iterator[str]:
    """Yield the names that code assigns by a bytecode instruction."""
    for step in dis.get_instructions(code):
        if step.opname == instruction:
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _assigned(constant, instruction)
