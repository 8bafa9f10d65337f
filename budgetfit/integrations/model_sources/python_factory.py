"""Load models, batches and losses from user code: ``module:name``, ``file.py:name``.

A factory returns a model, optionally with batch and loss.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from budgetfit.batches.batch_tree import batch_size_of
from budgetfit.errors import InputError
from budgetfit.example_batches.make_batch import copy_to_cpu
from budgetfit.integrations.model_sources.model_name import (
    FACTORY_EXAMPLE,
    check_factory_file,
    one_line,
)
from budgetfit.integrations.model_sources.resolved_model import ResolvedModel
from budgetfit.utils.function_name import is_factory_text

_ALONE = "Run it by itself to see where."


def load_factory(text: str) -> ResolvedModel:
    """Call a model factory, on ``meta`` where possible.

    The factory is called without arguments, first under ``torch.device("meta")`` so
    that no weights are allocated and, where that fails, once more on the CPU. Its
    folder (for a module: the working folder) is prepended to ``sys.path``, as when
    Python runs a file, and stays there, because a model may import more while it runs;
    a failure removes it. What the code prints goes to stderr.

    The name may be that of a function, a class, or an existing ``nn.Module``. It may
    also return ``(model, batch)`` or ``(model, batch, loss)``. Meta tensors of a batch
    get generated values; a batch that needs its own values can be a function without
    arguments, which is called on the CPU.

    Raises:
        InputError: No such file, module or name; the code raises, or returns no module.
    """
    with _imported(text) as factory:
        attribute = text.rpartition(":")[2]
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


def load_batch(text: str) -> object:
    """Load the example batch that a text names, or call the function that makes it.

    Raises:
        InputError: As ``load_factory``, or it is not a batch.
    """
    with _imported(text) as found:
        return _batch(found, text)


def load_loss(text: str) -> Callable[..., object]:
    """Load the loss function that a text names; refuse what is none."""
    with _imported(text) as found:
        if not callable(found):
            raise InputError(
                f"{text} is a {type(found).__name__}; a loss must be a function: "
                "loss(outputs, batch) -> scalar."
            )
        return found


@contextmanager
def _imported(text: str) -> Iterator[object]:
    """Import what a text names; undo the import if the context fails."""
    if not is_factory_text(text):
        raise InputError(
            f"{text!r:.80} names nothing in Python code. {FACTORY_EXAMPLE} A loss must "
            "be a function: loss(outputs, batch) -> scalar; a batch holds tensors."
        )
    place, _, attribute = text.rpartition(":")
    with (
        _undone_on_failure(place),
        redirect_stdout(sys.stderr),
        torch.random.fork_rng(devices=[]),
    ):
        yield _attribute(_import(place), attribute, place)


def _batch(made: object, text: str) -> object:
    """Call a function that makes a batch; refuse meta tensors."""
    if callable(made):
        made = _result(made, text)
    try:
        batch_size_of(made)
    except InputError as error:
        raise InputError(
            f"{text} gave no batch. {error} Make it return such tensors."
        ) from None
    return copy_to_cpu(made)


def _called(factory: Callable[[], object], text: str) -> ResolvedModel:
    """Call a factory on meta, else on the CPU."""

    def materialize(
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        with redirect_stdout(sys.stderr):
            model, *_ = _parts(_result(factory, text), text)
        return model.to(device=device, dtype=dtype)

    try:
        with torch.device("meta"):
            model, batch, loss = _parts(factory(), text)
        why = ""
    except InputError:
        why = "it returns no module"
    except (Exception, SystemExit) as error:  # noqa: BLE001, the CPU decides
        why = f"it raises {type(error).__name__}"
    if why:
        model, batch, loss = _parts(_result(factory, text), text)
    return ResolvedModel(
        model=model,
        name=type(model).__name__,
        source=f"from {text}, {'built on the CPU' if why else 'no weights allocated'}",
        materialize=materialize,
        notes=(f"{text} was called on the CPU: on meta {why}",) if why else (),
        batch=None if batch is None else _batch(batch, text),
        loss=loss,
    )


def _result(factory: Callable[[], object], text: str) -> object:
    """Call a function; ``InputError`` has its exception's message in one line."""
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{text} is called without arguments and raised {one_line(error)} {_ALONE}"
        ) from error


def _parts(
    made: object, text: str
) -> tuple[nn.Module, object, Callable[..., object] | None]:
    """Split a factory's result into model, batch and loss.

    Raises:
        InputError: There is no model, or the loss is not a function.
    """
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):  # noqa: PLR2004
        kinds = ", ".join(type(part).__name__ for part in parts[:4])
        raise InputError(
            f"{text} returned a {f'tuple of {kinds}' if parts is made else kinds}; it "
            "must return one torch.nn.Module, (model, batch) or (model, batch, loss). "
            f"{FACTORY_EXAMPLE}"
        )
    model, batch, loss = (*parts, None, None)[:3]
    if loss is not None and not callable(loss):
        raise InputError(
            f"{text} returned a {type(loss).__name__} as its loss; it must be a "
            "function: loss(outputs, batch) -> scalar."
        )
    return model, batch, loss


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
        cause: BaseException = error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of a user
        cause = error
    raise InputError(f"Importing {place} raised {one_line(cause)} {_ALONE}") from cause


def _import_file(file: Path) -> ModuleType:
    """Run a file as a module under a unique name."""
    # Not as ``__main__``: a training script behind ``if __name__ == "__main__":`` must
    # not start. Not under its bare name either: ``random.py`` would replace Python's.
    check_factory_file(file)
    name = f"budgetfit_factory_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{file} is no Python file. {FACTORY_EXAMPLE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes look up their module there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"Running {file} raised {one_line(error)} {_ALONE}") from error
    return module


def _attribute(module: ModuleType, attribute: str, place: str) -> object:
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            here = [
                name
                for name, value in vars(module).items()
                if callable(value)
                and getattr(value, "__module__", "") == module.__name__
            ]
            nearest = sorted(get_close_matches(name, here, n=8, cutoff=0.0))
            hint = f" It defines {', '.join(nearest)}." if here else ""
            raise InputError(f"{place} has no {attribute}.{hint}")
        found = getattr(found, name)
    return found


@contextmanager
def _undone_on_failure(place: str) -> Iterator[None]:
    """Prepend the code's folder to ``sys.path``; undo all imports after a failure."""
    is_file = place.endswith(".py")
    folder = Path(place).expanduser().resolve().parent if is_file else Path.cwd()
    path_before = list(sys.path)
    modules_before = dict(sys.modules)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    # Import caches of folders: a file written a moment ago must be found.
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
