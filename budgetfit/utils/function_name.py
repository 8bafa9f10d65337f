"""Functions as text: the name in a saved plan, and what a command line takes."""

import functools
from collections.abc import Callable


def qualified_name(function: Callable[..., object]) -> str:
    """Return ``module.qualname``; a partial is named after its function."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def is_factory_text(text: str) -> bool:
    """Whether a text names a factory: ``module:name`` or ``file.py:name``."""
    place, colon, attribute = text.rpartition(":")
    return bool(colon and place) and all(
        name.isidentifier() for name in attribute.split(".")
    )
