"""Tell library code from user code; globals that user code reads; its hooks."""

import functools
import re
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

# Libraries even in editable installs: their versions are in the cache key.
_LIBRARIES: Final = frozenset({"torch", "numpy", "transformers", "budgetfit", "scipy"})


def is_library(module: str) -> bool:
    """Whether a module is installed library code, identified by its version."""
    root = module.partition(".")[0]
    if root in _LIBRARIES or root in sys.stdlib_module_names or root == "builtins":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_installed(file)


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a file was installed by a package manager, or came with Python."""
    # In site-packages (of an environment, the system or the user), or in another folder
    # of ``sys.path`` with a RECORD of it: of ``pip install --target`` or an HPC module.
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


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return ``referenced_names`` as a set."""
    return frozenset(referenced_names(code))


def namespaces(function: types.FunctionType) -> list[dict[str, Any]]:
    """Return a function's globals, and those of the user's modules that it names."""
    # Modules that it imports itself are among them.
    own = function.__globals__
    package = own.get("__package__")
    modules = [
        each
        for name in names_in(function.__code__)
        for each in (
            own.get(name),
            sys.modules.get(name),
            sys.modules.get(f"{package}.{name}"),
        )
        if isinstance(each, types.ModuleType) and not is_library(each.__name__)
    ]
    return [own, *map(vars, modules)]


def referenced_globals(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the globals that a function references, with their values."""
    for name in referenced_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def users_hooks(modules: Iterable[Any]) -> list[Any]:
    """Return the user's forward hooks of modules, and those of all modules."""
    every: Any = sys.modules["torch.nn.modules.module"]
    tables = [every._global_forward_pre_hooks, every._global_forward_hooks]  # noqa: SLF001
    for module in modules:
        tables += [module._forward_pre_hooks, module._forward_hooks]  # noqa: SLF001
    return [
        hook
        for hooks in tables
        for hook in hooks.values()
        if not is_library(getattr(function_of(hook), "__module__", None) or "builtins")
    ]


def function_of(hook: object) -> object:
    """Return the function that a hook runs."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    is_function = isinstance(hook, (types.FunctionType, types.MethodType))
    call = hook if is_function else getattr(type(hook), "__call__", None)  # noqa: B004
    return getattr(call, "__func__", call)
