"""Nothing but the traced program happens during a trace, and random state stays."""

from __future__ import annotations

import contextlib
import gc
import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from budgetfit.tracing.isolation.imports import real_imports
from budgetfit.tracing.isolation.scalar_randomness import lone_chances

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def quiet_machine() -> Iterator[None]:
    """No garbage collection or import as part of a trace; random state as it was.

    What is drawn meanwhile is no chance (``lone_chances``).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            real_imports(),
            lone_chances(),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - models draw from it
        if was_enabled:
            gc.enable()
