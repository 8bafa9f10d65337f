"""Qualified name of a function, for saved plans."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def qualified_name(function: Callable[..., object]) -> str:
    """Return ``module.qualname``; a partial is named after its function."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
