"""A model out of a user's own code: ``package.module:factory``, ``file.py:factory``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.core.errors import InputError
from budgetfit.integrations.model_text import FACTORY_EXAMPLE, check_factory_file
from budgetfit.integrations.resolved_model import ResolvedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

_ALONE = ". Run it by itself to see where."


def load_factory(text: str) -> ResolvedModel:
    """Return the model that a factory builds, on ``meta`` where it can be built there.

    The factory is called without arguments, first under ``torch.device("meta")`` so
    that no weights are allocated and, where that fails, once more on the CPU. Its
    folder (for a module: the working folder) leads ``sys.path`` as it does when Python
    runs a file, and stays there, because a model may import more while it runs; after a
    failure nothing stays. What the code prints goes to stderr.

    Args:
        text: ``package.module:factory`` or ``path/file.py:factory``. The name may be
            that of a function, a class, or a module that exists already.

    Raises:
        InputError: No such file, module or name; the code raises, or returns no module.
    """
    place, _, attribute = text.rpartition(":")
    with (
        _undone_on_failure(place),
        redirect_stdout(sys.stderr),
        torch.random.fork_rng(devices=[]),
    ):
        factory = _attribute(_import(place), attribute, place)
        if isinstance(factory, nn.Module):
            return ResolvedModel(
                model=factory, name=attribute, source=f"the module {text}"
            )
        if not callable(factory):
            raise InputError(
                f"{text} is a {type(factory).__name__} and no function. "
                f"{FACTORY_EXAMPLE}"
            )
        return _called(factory, text)


def _called(factory: Callable[[], Any], text: str) -> ResolvedModel:
    """Call a factory where nothing is allocated, else where it works."""

    def materialise(
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        with redirect_stdout(sys.stderr):
            model = _module(factory, text)
        return model.to(device=device, dtype=dtype)

    try:
        with torch.device("meta"):
            model = factory()
        why = "" if isinstance(model, nn.Module) else "it returns no module"
    except (Exception, SystemExit) as error:  # noqa: BLE001, the CPU decides
        why = f"it raises {type(error).__name__}"
    if why:
        model = _module(factory, text)
    return ResolvedModel(
        model=model,
        name=type(model).__name__,
        source=f"from {text}, {'built on the CPU' if why else 'no weights allocated'}",
        materialise=materialise,
        notes=(f"{text} was called on the CPU: on meta {why}",) if why else (),
    )


def _module(factory: Callable[[], Any], text: str) -> nn.Module:
    """Call a factory and insist on a module.

    Raises:
        InputError: With the exception's own words, in one line.
    """
    try:
        model = factory()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{text} is called without arguments and raised {_one_line(error)}{_ALONE}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{text} returned a {type(model).__name__}; it must return one "
            f"torch.nn.Module. {FACTORY_EXAMPLE}"
        )
    return model


def _import(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _import_file(Path(place).expanduser())
    if "/" in place or "\\" in place:
        raise InputError(f"{place} is no module and no .py file. {FACTORY_EXAMPLE}")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (f"{place}.").startswith(f"{error.name}."):
            raise InputError(
                f"There is no module {error.name} in {Path.cwd()} or among the "
                f"installed packages. {FACTORY_EXAMPLE}"
            ) from error
        raise InputError(
            f"Importing {place} raised {_one_line(error)}{_ALONE}"
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(
            f"Importing {place} raised {_one_line(error)}{_ALONE}"
        ) from error


def _import_file(file: Path) -> ModuleType:
    """Run a file as a module of its own name.

    Not as ``__main__``: a training script behind ``if __name__ == "__main__":`` must
    not start. Not under its bare name either: ``random.py`` would replace Python's.
    """
    check_factory_file(file)
    name = f"budgetfit_factory_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{file} is no Python file. {FACTORY_EXAMPLE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"Running {file} raised {_one_line(error)}{_ALONE}") from error
    return module


def _attribute(module: ModuleType, attribute: str, place: str) -> Any:  # noqa: ANN401
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            here = sorted(
                name
                for name, value in vars(module).items()
                if callable(value)
                and getattr(value, "__module__", "") == module.__name__
            )
            hint = f" It defines {', '.join(here[:8])}." if here else ""
            raise InputError(f"{place} has no {attribute}.{hint}")
        found = getattr(found, name)
    return found


@contextmanager
def _undone_on_failure(place: str) -> Iterator[None]:
    """Lead ``sys.path`` with the code's folder; take it all back after a failure."""
    is_file = place.endswith(".py")
    folder = Path(place).expanduser().resolve().parent if is_file else Path.cwd()
    path_before = list(sys.path)
    modules_before = dict(sys.modules)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    # Folders remember what they hold: a file written a moment ago must be found.
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        sys.path[:] = path_before
        for name, module in list(sys.modules.items()):
            if modules_before.get(name) is module:
                continue
            # Libraries stay: some, like numpy, cannot be imported twice.
            if name.startswith("budgetfit."):
                continue
            if name.startswith("budgetfit_factory_") or _is_in(module, folder):
                del sys.modules[name]
                if name in modules_before:
                    sys.modules[name] = modules_before[name]
        raise


def _is_in(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return (
        file is not None
        and folder in Path(file).parents
        and "site-packages" not in Path(file).parts
    )


def _one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    words = words.rstrip(".")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
