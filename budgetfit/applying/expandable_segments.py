"""Expandable segments of PyTorch's CUDA allocator, for the time of a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from budgetfit.applying.undo import Undo

# torch/csrc reads the first that is set (docs.pytorch.org/docs/stable/notes/cuda.html).
VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SETTING: Final = "expandable_segments"


def use_expandable_segments(undo: Undo) -> None:
    """Let the allocator make expandable segments from now on, until ``undo``.

    Segments that exist stay as they are. Settings in the environment are left alone.
    """
    if any(os.environ.get(name) for name in VARIABLES):
        return
    # The setting of torch.cuda.memory, which has no public function.
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None:  # torch 2.8 and older
        set_settings = torch.cuda.memory._set_allocator_settings
    set_settings(f"{_SETTING}:True")
    undo.add(set_settings, f"{_SETTING}:False")
