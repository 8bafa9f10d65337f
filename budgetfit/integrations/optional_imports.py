"""Libraries that may not be there, imported when they are asked for."""

from __future__ import annotations

import contextlib
import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Keep a library from logging what it could not load: kernels for other machines.

    What cannot be imported at all is an error, and stays one.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def find_attribute(module: str, name: str) -> Any:  # noqa: ANN401 - a library's class
    """Return something of a library that is not a dependency.

    Raises:
        InputError: If it cannot be imported; says what to install.
    """
    library = module.split(".", maxsplit=1)[0]
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"This needs {name} of {library}, which cannot be imported ({error}). "
            f"Install it: pip install {library}."
        ) from error
