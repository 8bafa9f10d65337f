"""Find globals that the methods of a user's classes may mutate."""

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from budgetfit.utils.mutable_state import kind_of
from budgetfit.utils.user_code import is_library, referenced_globals


@functools.cache
def mutated_globals(kind: Any) -> tuple[tuple[dict[str, Any], str], ...]:  # noqa: ANN401
    """Return the globals that methods of a user's class ``kind`` may mutate.

    Those in ``global`` statements, and containers and other objects; also of the
    user's functions that the methods call. Each with the namespace that contains it.
    """
    return _mutated_by(
        each
        for parent in kind.__mro__
        if not is_library(parent.__module__)
        for each in vars(parent).values()
    )


def _mutated_by(functions: Iterable[Any]) -> tuple[tuple[dict[str, Any], str], ...]:
    """Return the globals that the user's functions and what these call may mutate."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    waiting = list(functions)
    seen = set()
    while waiting:
        function = waiting.pop()
        if (
            not isinstance(function, types.FunctionType)
            or function in seen
            or is_library(function.__module__ or "")
        ):
            continue
        seen.add(function)
        places = function.__globals__
        names = {*_set_globally(function.__code__)}
        for name, value in referenced_globals(function):
            waiting.append(value)
            if kind_of(value) is not None:
                names.add(name)
        found |= {(id(places), name): (places, name) for name in names}
    return tuple(found.values())


def mutated_globals_of_all(
    kinds: Iterable[Any], functions: Iterable[Any] = ()
) -> list[tuple[dict[str, Any], str]]:
    """Return ``mutated_globals`` of classes and functions, without duplicates."""
    found = {
        (id(places), name): (places, name)
        for mutated in (
            *map(mutated_globals, dict.fromkeys(kinds)),
            _mutated_by(functions),
        )
        for places, name in mutated
    }
    return list(found.values())


def _set_globally(code: types.CodeType) -> Iterator[str]:
    """Yield the names that ``global`` statements assign."""
    for step in dis.get_instructions(code):
        if step.opname == "STORE_GLOBAL":
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _set_globally(constant)
