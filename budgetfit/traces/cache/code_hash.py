"""Hash code: functions, classes and everything that they refer to.

A *library* (the standard library, torch, anything in site-packages) is hashed by its
version and source files; parts of it may be patched in this process, so the members of
its classes are hashed as well, one level deep. *User code* is followed through every
function, class and constant that it refers to, and all loaded modules of its package
are hashed as files.
"""

import dis
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator
from inspect import getclosurevars
from pathlib import Path
from typing import Any, Final, Protocol

from budgetfit.utils.user_code import is_installed, is_library, referenced_names

# Too many files to read: the version and the files of the classes used must do.
_WHOLE_VERSIONS: Final = frozenset({"torch", "budgetfit", *sys.stdlib_module_names})
# Entries of a class's namespace that do not change its behaviour.
_NO_BEHAVIOUR: Final = frozenset(
    {
        "__abstractmethods__",
        "__annotations__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
        "___needs_generation_tag_patch",  # whether torch.compile was used
    }
)
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
# torch.compile wraps two methods of nn.Module, for good, to number new modules.
_NUMBERING: Final = "torch._dynamo.mutation_guard"
# And leaves what it has compiled among the globals of a module (OutputGraph).
_COMPILED: Final = ("__compiled_fn_", "__resume_at_")


class NotCacheableError(Exception):
    """A value whose effect on a trace is unknown; the message names it."""


class Hasher(Protocol):
    """The hash that values are added to: ``value_hash.ValueHash``."""

    def add(self, *values: Any) -> None:
        """Add values to the hash."""

    def first_seen(self, token: str) -> bool:
        """Whether ``token`` was not asked for before."""


def add_function(hasher: Hasher, function: types.FunctionType) -> None:
    """Hash a function: its code, defaults, closure and the globals it uses."""
    hasher.add(function.__module__ or "", function.__qualname__)
    hasher.add(code_digest(function.__code__))
    hasher.add(function.__defaults__, function.__kwdefaults__)
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            content = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if name == "__class__":  # of super(); the class is being hashed
            continue
        hasher.add(name, content)
    home = function.__module__ or ""
    if is_library(home):
        return
    add_loaded_modules(hasher, home)
    _check_imports(function)
    hasher.add(dict(vars(function)))
    names = set(referenced_names(function.__code__))
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        hasher.add(name)
        if isinstance(value, types.ModuleType):
            _add_module_parts(hasher, value, names)
        else:
            hasher.add(value)


def _add_module_parts(
    hasher: Hasher, module: types.ModuleType, names: set[str]
) -> None:
    """Hash what code can reach as ``module.name``."""
    hasher.add(module.__name__)
    if is_library(module.__name__):
        return
    add_loaded_modules(hasher, module.__name__)
    for name in sorted(names & vars(module).keys()):
        value = vars(module)[name]
        hasher.add(
            name, value.__name__ if isinstance(value, types.ModuleType) else value
        )


def add_class(hasher: Hasher, cls: type) -> None:
    """Hash a class and its base classes."""
    for base in cls.__mro__:
        hasher.add(base.__module__, base.__qualname__)
        if base.__module__ == "builtins" or not hasher.first_seen(f"class {id(base)}"):
            continue
        if is_library(base.__module__):
            _add_library_class(hasher, base)
        else:
            _add_user_class(hasher, base)


def _add_user_class(hasher: Hasher, cls: type) -> None:
    add_loaded_modules(hasher, cls.__module__)
    for name, value in vars(cls).items():
        if name not in _NO_BEHAVIOUR and not isinstance(
            value, (types.GetSetDescriptorType, types.MemberDescriptorType)
        ):
            hasher.add(name, value)


def _add_library_class(hasher: Hasher, cls: type) -> None:
    """Hash a library's class, with patched methods and helpers."""
    module = sys.modules.get(cls.__module__)
    hasher.add(file_digest(getattr(module, "__file__", None)))
    root = sys.modules.get(cls.__module__.partition(".")[0])
    hasher.add(str(getattr(root, "__version__", "")))
    add_loaded_modules(hasher, cls.__module__)  # of a working copy
    for name, value in vars(cls).items():
        for function in _functions_in(value):
            if not is_library(function.__module__ or ""):
                hasher.add(name, function)
                continue
            hasher.add(name, function.__module__ or "", function.__qualname__)
            hasher.add(code_digest(function.__code__))
        if isinstance(value, _PLAIN) and name not in _NO_BEHAVIOUR:
            hasher.add(name, value)
    if (
        module is not None
        and hasher.first_seen(f"replaced {module.__name__}")
        and cls.__module__.partition(".")[0] not in ("torch", *sys.stdlib_module_names)
    ):
        _add_replaced(hasher, module)


def _add_replaced(hasher: Hasher, module: types.ModuleType) -> None:
    """Hash every function, class and constant of a library's module."""
    # Kernel libraries (Liger) replace a model's helpers with their own functions.
    for name, value in vars(module).items():
        if name.startswith(_COMPILED):
            continue
        if isinstance(value, (bool, int, float, type(None))):
            hasher.add(name, value)  # not strings: paths and session numbers
        elif isinstance(value, types.FunctionType):
            if is_library(value.__module__ or ""):
                hasher.add(name, value.__module__ or "", code_digest(value.__code__))
            else:
                hasher.add(name, value)
        elif isinstance(value, type):
            hasher.add(name, value.__module__, value.__qualname__)


def _functions_in(value: Any) -> Iterator[types.FunctionType]:  # noqa: ANN401
    if isinstance(value, types.FunctionType):
        while value.__module__ == _NUMBERING:
            value = next(iter(getclosurevars(value).nonlocals.values()))
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from _functions_in(part)


def add_loaded_modules(hasher: Hasher, module: str) -> None:
    """Hash the files of all loaded modules of a module's package."""
    # These include modules that a function imports when it runs.
    root = module.partition(".")[0]
    if root in _WHOLE_VERSIONS or not hasher.first_seen(f"modules {root}"):
        return
    for name, loaded in sorted(sys.modules.items()):
        if name == root or name.startswith(f"{root}."):
            file = getattr(loaded, "__file__", None)
            if file is not None and not is_installed(file):
                hasher.add(name, file_digest(file))


def _check_imports(function: types.FunctionType) -> None:
    """Raise for imports inside a function of modules that are not loaded yet."""
    package = function.__globals__.get("__package__") or ""
    for name in _imports(function.__code__):
        known = is_library(name) or name in sys.modules
        if not known and not any(
            loaded in sys.modules for loaded in (f"{package}.{name}", package) if loaded
        ):
            raise NotCacheableError(f"{function.__qualname__} imports {name}")


@functools.cache
def _imports(code: types.CodeType) -> tuple[str, ...]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return (
        *(
            step.argval
            for step in dis.get_instructions(code)
            if step.opname == "IMPORT_NAME"
        ),
        *(name for each in inner for name in _imports(each)),
    )


@functools.cache
def code_digest(code: types.CodeType) -> bytes:
    """Return a hash of bytecode, names and constants, without file and lines."""
    hasher = hashlib.sha256(code.co_code)
    parts: list[object] = [
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_flags,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        getattr(code, "co_exceptiontable", b""),
    ]
    parts += map(_constant, code.co_consts)
    hasher.update(repr(parts).encode("utf-8", "backslashreplace"))
    return hasher.digest()


def _constant(value: object) -> object:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):  # its order changes from process to process
        return sorted(map(repr, value))
    return (type(value).__name__, value)


def file_digest(path: str | None) -> bytes:
    """Return a hash of a source file's current content; empty if there is none."""
    if path is None or not path.endswith(".py"):
        return b""
    try:
        stat = Path(path).stat()
    except OSError:
        return b""
    return _digest_of_file(path, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _digest_of_file(path: str, _mtime_ns: int, _size_bytes: int) -> bytes:
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError as error:
        raise NotCacheableError(path) from error


def is_builtin(value: object) -> bool:
    """Whether a callable is implemented in C, and identified by its name."""
    return isinstance(
        value,
        (
            types.BuiltinFunctionType,
            types.MethodDescriptorType,
            types.WrapperDescriptorType,
            types.ClassMethodDescriptorType,
        ),
    )


def cached_function(value: object) -> Callable[..., Any] | None:
    """Return the function wrapped by ``functools.cache`` or ``lru_cache``."""
    if isinstance(value, type(is_installed)):
        return getattr(value, "__wrapped__", None)
    return None
