"""Import a module when it is needed, and change nothing that a user has set up."""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def import_late(name: str) -> ModuleType:
    """Return a module; Python's generator, which a user may have seeded, stays.

    Rich draws from it while it is imported.
    """
    state = random.getstate()
    try:
        return importlib.import_module(name)
    finally:
        random.setstate(state)
