"""Import optional dependencies, with errors that say what to install."""

import contextlib
import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from budgetfit.errors import InputError


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Suppress import-time logging about missing optional kernels, not errors."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def import_library(name: str, why_not: str) -> Any:
    """Import an optional library, which is slow, without its logging.

    ``why_not``: the text of the error, what needs it and what to install.

    Raises:
        InputError: If it is not installed.
    """
    try:
        with quiet_import():
            return import_module(name)
    except ImportError:
        raise InputError(why_not) from None


def import_attribute(module: str, name: str) -> Any:
    """Import from an optional dependency, or say what to install."""
    library = module.split(".", maxsplit=1)[0]
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"This needs {name} of {library}, which cannot be imported ({error}). "
            f"Install it: pip install {library}."
        ) from error
