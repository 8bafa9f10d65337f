"""Import optimizer libraries that are needed for training, not for planning."""

from __future__ import annotations

import importlib
from typing import Any

from budgetfit.errors import InputError


def import_optimizer_library(name: str, module: str) -> Any:
    """Import the module of an optimizer's library.

    Args:
        name: The optimizer's name in a recipe.
        module: The module to import, for example ``bitsandbytes.optim``.

    Raises:
        InputError: If it cannot be imported; says what to install.
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"Optimizer {name!r} is {library}'s. Planning needs no {library}, "
            f"training does: pip install {library} ({error})."
        ) from None
