"""A process group of many ranks in one process, for the time of a trace."""

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.errors import InputError
from budgetfit.utils.lazy_import import lazy_import


@contextlib.contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Make torch's fake process group the default one; this process is rank 0.

    Raises:
        InputError: If there is a process group already: a process has one default.
    """
    distributed = torch.distributed
    if not distributed.is_available():
        raise InputError(
            "This PyTorch was built without torch.distributed, so a plan for several "
            "GPUs cannot be made. Install a build with it."
        )
    if distributed.is_initialized():
        raise InputError(
            "This process has a process group already, and a plan for several GPUs "
            "needs its own. Plan before init_process_group, save the plan, and load it "
            "in the training processes."
        )
    hook = sys.excepthook  # replaced by init_process_group
    fakes = lazy_import("torch.testing._internal.distributed.fake_pg")
    with _disable_current_modes():
        distributed.init_process_group(
            "fake", store=fakes.FakeStore(), rank=0, world_size=ranks
        )
    try:
        yield
    finally:
        with _disable_current_modes():
            distributed.destroy_process_group()
        sys.excepthook = hook
