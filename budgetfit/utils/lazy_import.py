"""Lazy import that preserves Python's random state."""

import importlib
import random
from types import ModuleType


def lazy_import(name: str) -> ModuleType:
    """Import a module and restore the state of ``random``."""
    # Rich draws random numbers while it is imported.
    state = random.getstate()
    try:
        return importlib.import_module(name)
    finally:
        random.setstate(state)
