"""The allocator settings of the running process, and where a plan is for others."""

import os
import warnings

import torch

from budgetfit.applying.undo import Undo
from budgetfit.core.allocator.settings import (
    DEFAULT_SETTINGS,
    VARIABLE,
    VARIABLES,
    AllocatorSettings,
    variable_in,
)
from budgetfit.core.plan import Plan
from budgetfit.errors import InputError


def running_settings() -> AllocatorSettings | None:
    """Return the allocator's settings in this process; None where they are unknown."""
    # PyTorch reads the environment when CUDA is first used, and later changes
    # (``torch.cuda.memory._set_allocator_settings``) are its own. Before that it is not
    # asked, because then it would not look at the environment again.
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None and torch.cuda.is_initialized():
        text = read()
    else:
        name = variable_in(os.environ)
        text = "" if name is None else os.environ[name]
    try:
        return AllocatorSettings.parse(text)
    except InputError:
        return None


def other_settings(plan: Plan) -> str | None:
    """Say where this process runs with other settings than the plan was made for."""
    planned, running = plan.budget.allocator, running_settings()
    if running == planned:
        return None
    now = "others" if running is None else running.text or "PyTorch's defaults"
    wanted = planned.text or "PyTorch's defaults"
    todo = (
        f"export {VARIABLE}={planned.shell_text} before Python starts"
        if planned != DEFAULT_SETTINGS
        else f"unset {variable_in(os.environ) or VARIABLE} before Python starts"
    )
    return (
        f"the plan is for the allocator settings {wanted}, and this process runs with "
        f"{now}: it will reserve other memory. {todo[0].upper()}{todo[1:]}, or plan "
        "with allocator= for what runs here."
    )


def use_planned_settings(plan: Plan | None, device: torch.device, undo: Undo) -> None:
    """Let the allocator make expandable segments, where lengths need them.

    From now on, until ``undo``: segments that exist stay as they are. Settings in the
    environment are left alone.
    """
    if plan is None or device.type != "cuda" or not plan.needs_expandable_segments:
        return
    if any(os.environ.get(name) for name in VARIABLES):
        return
    # torch.cuda.memory has no public function for it.
    change = torch._C._accelerator_setAllocatorSettings
    change("expandable_segments:True")
    undo.add(change, "expandable_segments:False")


def warn_of_other_settings(plan: Plan | None, device: torch.device) -> None:
    """Warn where the process on a card has other settings than the plan is for."""
    if plan is None or device.type != "cuda":
        return
    difference = other_settings(plan)
    if difference is not None:
        warnings.warn(difference[0].upper() + difference[1:], stacklevel=4)
