"""Which allocator settings to plan for: those that are given, or this process's."""

import os
import sys
from dataclasses import replace

from budgetfit.core.allocator.settings import (
    DEFAULT_SETTINGS,
    VARIABLE,
    AllocatorSettings,
    variable_in,
)

Given = AllocatorSettings | str | None


def find_allocator_settings(
    given: Given, *, is_here: bool
) -> tuple[AllocatorSettings, tuple[str, ...]]:
    """Return the settings, and notes on where they are from.

    ``given``: settings, or what the variable would say; None: what it says here if this
    machine has the GPU (``is_here``), since training then runs here.

    Raises:
        InputError: PyTorch would refuse them, or they cannot be predicted.
    """
    if given is not None:
        settings = (
            given
            if isinstance(given, AllocatorSettings)
            else AllocatorSettings.parse(given)
        )
        if settings.is_default:
            return settings, ()
        note = (
            "predicted for an allocator with settings: export "
            f"{VARIABLE}={settings.shell_text} where training runs"
        )
        return settings, (note,)
    name = variable_in(os.environ)
    if name is None:
        return DEFAULT_SETTINGS, ()
    if not is_here:
        note = (
            f"{name} is set in this process, but the card is not this machine's: "
            "predicted without; allocator= predicts with settings"
        )
        return DEFAULT_SETTINGS, (note,)
    settings = AllocatorSettings.parse(os.environ[name])
    if sys.platform == "win32":  # PyTorch leaves them out there, with a warning
        settings = replace(settings, expandable_segments=False)
    if settings.is_default:
        return settings, ()
    return settings, (f"predicted with {name}={settings.text}, as set in this process",)
