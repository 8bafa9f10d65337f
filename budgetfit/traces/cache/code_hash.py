"""What code does, as something to hash: functions, classes and all that they reach.

Two kinds of code are told apart. A *library* (the standard library, torch, whatever is
installed in site-packages) is what its version and source files say, unless somebody
replaced parts of it in this process, so what its classes hold is looked at one level
deep. *User code* is followed through every function, class and constant that it names,
and all loaded modules of its package are hashed as files.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from budgetfit.utils.user_code import is_installed, is_library, names_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Too many files to read; what is not in the version is in their classes' own files.
_WHOLE_VERSIONS: Final = frozenset({"torch", "budgetfit", *sys.stdlib_module_names})
# In a class's namespace, but no part of what it does.
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
    }
)
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))


class NotCacheableError(Exception):
    """Something whose effect on a trace cannot be told; the text names it."""


class Adds(Protocol):
    """What collects descriptions: ``planning.fingerprint.Fingerprint``."""

    def add(self, *values: Any) -> None:  # noqa: ANN401
        """Take values in."""

    def first(self, token: str) -> bool:
        """Whether ``token`` was not asked for before."""


def add_function(found: Adds, function: types.FunctionType) -> None:
    """Describe a function: its code, defaults, closure and the globals it names."""
    found.add(function.__module__ or "", function.__qualname__)
    found.add(code_digest(function.__code__))
    found.add(function.__defaults__, function.__kwdefaults__)
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            content = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if name == "__class__":  # of super(); the class is on its way already
            continue
        found.add(name, content)
    home = function.__module__ or ""
    if is_library(home):
        return
    add_loaded_modules(found, home)
    _check_imports(function)
    found.add(dict(vars(function)))
    names = set(names_in(function.__code__))
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        found.add(name)
        if isinstance(value, types.ModuleType):
            _add_module_parts(found, value, names)
        else:
            found.add(value)


def _add_module_parts(found: Adds, module: types.ModuleType, names: set[str]) -> None:
    """Describe what code can reach as ``module.name``."""
    found.add(module.__name__)
    if is_library(module.__name__):
        return
    add_loaded_modules(found, module.__name__)
    for name in sorted(names & vars(module).keys()):
        value = vars(module)[name]
        found.add(
            name, value.__name__ if isinstance(value, types.ModuleType) else value
        )


def add_class(found: Adds, cls: type) -> None:
    """Describe a class and those that it inherits from."""
    for base in cls.__mro__:
        found.add(base.__module__, base.__qualname__)
        if base.__module__ == "builtins" or not found.first(f"class {id(base)}"):
            continue
        if is_library(base.__module__):
            _add_library_class(found, base)
        else:
            _add_user_class(found, base)


def _add_user_class(found: Adds, cls: type) -> None:
    add_loaded_modules(found, cls.__module__)
    for name, value in vars(cls).items():
        if name not in _NO_BEHAVIOUR and not isinstance(
            value, (types.GetSetDescriptorType, types.MemberDescriptorType)
        ):
            found.add(name, value)


def _add_library_class(found: Adds, cls: type) -> None:
    """Describe a library's class so that replaced methods and helpers are seen."""
    module = sys.modules.get(cls.__module__)
    found.add(file_digest(getattr(module, "__file__", None)))
    root = sys.modules.get(cls.__module__.partition(".")[0])
    found.add(str(getattr(root, "__version__", "")))
    add_loaded_modules(found, cls.__module__)  # of a working copy
    for name, value in vars(cls).items():
        for function in _functions_in(value):
            if not is_library(function.__module__ or ""):
                found.add(name, function)
                continue
            found.add(name, function.__module__ or "", function.__qualname__)
            found.add(code_digest(function.__code__))
        if isinstance(value, _PLAIN) and name not in _NO_BEHAVIOUR:
            found.add(name, value)
    if (
        module is not None
        and found.first(f"replaced {module.__name__}")
        and cls.__module__.partition(".")[0]
        not in (
            "torch",
            *sys.stdlib_module_names,
        )
    ):
        _add_replaced(found, module)


def _add_replaced(found: Adds, module: types.ModuleType) -> None:
    """Name every function, class and constant that a library's module uses.

    Kernels libraries put their own functions in the place of a model's helpers.
    """
    for name, value in vars(module).items():
        if isinstance(value, (bool, int, float, type(None))):
            found.add(name, value)  # and no text: paths and session numbers
        elif isinstance(value, types.FunctionType):
            if is_library(value.__module__ or ""):
                found.add(name, value.__module__ or "", code_digest(value.__code__))
            else:
                found.add(name, value)
        elif isinstance(value, type):
            found.add(name, value.__module__, value.__qualname__)


def _functions_in(value: Any) -> Iterator[types.FunctionType]:  # noqa: ANN401
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from _functions_in(part)


def add_loaded_modules(found: Adds, module: str) -> None:
    """Hash the files of all loaded modules of a module's package.

    What a function imports when it runs is among them.
    """
    root = module.partition(".")[0]
    if root in _WHOLE_VERSIONS or not found.first(f"modules {root}"):
        return
    for name, loaded in sorted(sys.modules.items()):
        if name == root or name.startswith(f"{root}."):
            file = getattr(loaded, "__file__", None)
            if file is not None and not is_installed(file):
                found.add(name, file_digest(file))


def _check_imports(function: types.FunctionType) -> None:
    """Refuse imports within a function of modules that nobody has loaded yet."""
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
    """Return a hash of bytecode, names and constants; where it stood does not count."""
    found = hashlib.sha256(code.co_code)
    parts: list[object] = [
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_flags,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        getattr(code, "co_exceptiontable", b""),
    ]
    parts += map(_constant, code.co_consts)
    found.update(repr(parts).encode("utf-8", "backslashreplace"))
    return found.digest()


def _constant(value: object) -> object:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):  # its order changes from process to process
        return sorted(map(repr, value))
    return (type(value).__name__, value)


def file_digest(path: str | None) -> bytes:
    """Return a hash of a source file as it is now; empty where there is none."""
    if path is None or not path.endswith(".py"):
        return b""
    try:
        found = Path(path).stat()
    except OSError:
        return b""
    return _digest_of_file(path, found.st_mtime_ns, found.st_size)


@functools.cache
def _digest_of_file(path: str, _mtime_ns: int, _size_bytes: int) -> bytes:
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError as error:
        raise NotCacheableError(path) from error


def is_builtin(value: object) -> bool:
    """Whether a callable has no Python code of its own, and a name that says all."""
    return isinstance(
        value,
        (
            types.BuiltinFunctionType,
            types.MethodDescriptorType,
            types.WrapperDescriptorType,
            types.ClassMethodDescriptorType,
        ),
    )


def wrapped(value: object) -> Callable[..., Any] | None:
    """Return what ``functools.cache`` and its kin wrap."""
    if isinstance(value, type(is_installed)):
        return getattr(value, "__wrapped__", None)
    return None
