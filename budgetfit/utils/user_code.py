"""Tell library code from user code; globals that user code reads or mutates."""

from __future__ import annotations

import contextlib
import dis
import functools
import re
import site
import sys
import sysconfig
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Libraries even in editable installs: their versions are in the cache key.
_LIBRARIES: Final = frozenset({"torch", "numpy", "transformers", "budgetfit", "scipy"})

CONTAINERS: Final = (list, dict, set)
_ABSENT: Final = object()


def is_library(module: str) -> bool:
    """Whether a module is installed library code, identified by its version."""
    root = module.partition(".")[0]
    if root in _LIBRARIES or root in sys.stdlib_module_names or root == "builtins":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_installed(file)


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a file was installed by a package manager, or came with Python.

    In site-packages (of an environment, the system or the user), or in another folder
    of ``sys.path`` with a RECORD of it: of ``pip install --target`` or an HPC module.
    """
    path = Path(file).resolve()
    return any(
        parent in _package_folders()
        or path.relative_to(parent).parts[0] in _recorded(parent)
        for parent in path.parents
    )


@functools.cache
def _package_folders() -> frozenset[Path]:
    paths = sysconfig.get_paths()
    names = ("purelib", "platlib", "stdlib", "platstdlib")
    found = [*(paths[name] for name in names), *site.getsitepackages()]
    return frozenset(Path(each).resolve() for each in (*found, site.USER_SITE) if each)


@functools.cache
def _recorded(folder: Path) -> frozenset[str]:
    """Return the packages and modules of a folder that have an install record."""
    if folder not in {Path(each).resolve() for each in sys.path if each}:
        return frozenset()
    return frozenset(
        re.split(r"[/,]", line, maxsplit=1)[0]
        for record in folder.glob("*.dist-info/RECORD")
        for line in record.read_text(encoding="utf-8", errors="replace").splitlines()
    )


def referenced_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code, nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from referenced_names(constant)


def referenced_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function references, with their values."""
    for name in referenced_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


@functools.cache
def mutated_globals(kind: Any) -> tuple[tuple[dict[str, Any], str], ...]:  # noqa: ANN401
    """Return the globals that methods of a user's class ``kind`` may mutate.

    Those in ``global`` statements, and lists, dicts and sets; also of the user's
    functions that the methods call. Each with the namespace that contains it.
    """
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    waiting = [
        each
        for parent in kind.__mro__
        if not is_library(parent.__module__)
        for each in vars(parent).values()
    ]
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
            if type(value) in CONTAINERS:
                names.add(name)
        found |= {(id(places), name): (places, name) for name in names}
    return tuple(found.values())


def mutated_globals_of_all(kinds: Iterable[Any]) -> list[tuple[dict[str, Any], str]]:
    """Return ``mutated_globals`` of several classes, without duplicates."""
    found = {
        (id(places), name): (places, name)
        for kind in dict.fromkeys(kinds)
        for places, name in mutated_globals(kind)
    }
    return list(found.values())


@contextlib.contextmanager
def preserve_globals(kinds: Iterable[Any]) -> Iterator[None]:
    """Restore globals that methods of these classes mutate in the context."""
    held = [
        (places, name, value, value.copy() if type(value) in CONTAINERS else None)
        for places, name in mutated_globals_of_all(kinds)
        if (value := places.get(name, _ABSENT)) is not _ABSENT
    ]
    try:
        yield
    finally:
        for places, name, value, content in held:
            places[name] = value
            if content is not None and not holds_same(content, value):
                replace_contents(value, content)


def holds_same(content: Any, other: Any) -> bool:  # noqa: ANN401
    """Whether containers hold the same objects; ``==`` of tensors is no bool."""
    if isinstance(content, set):  # by hash: a tensor's is its identity
        return bool(content == other)
    flat, others = (
        [*each.keys(), *each.values()] if isinstance(each, dict) else each
        for each in (content, other)
    )
    return list(map(id, flat)) == list(map(id, others))


def replace_contents(container: Any, content: Any) -> None:  # noqa: ANN401
    """Replace the contents of a list, dict or set by those of another."""
    container.clear()
    extend = container.extend if isinstance(container, list) else container.update
    extend(content)


def _set_globally(code: types.CodeType) -> Iterator[str]:
    """Yield the names that ``global`` statements assign."""
    for step in dis.get_instructions(code):
        if step.opname == "STORE_GLOBAL":
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _set_globally(constant)
