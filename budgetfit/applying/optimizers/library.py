"""Libraries whose optimizers can be planned without them, but not trained with."""

from __future__ import annotations

import importlib
from typing import Any

from budgetfit.errors import InputError


def import_to_train(name: str, module: str) -> Any:  # noqa: ANN401 - a module
    """Return the library that an optimizer's name stands for.

    Args:
        name: The optimizer, as a recipe names it.
        module: Where the library keeps its optimizers.

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
