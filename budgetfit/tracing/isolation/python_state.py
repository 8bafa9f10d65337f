"""Keep garbage collection, imports and random numbers of the program out of a trace."""

import contextlib
import gc
from collections.abc import Iterator

import torch

from budgetfit.tracing.isolation.imports import imports_outside_modes
from budgetfit.tracing.isolation.private_generators import private_generators
from budgetfit.tracing.isolation.scalar_randomness import pinned_scalar_draws


@contextlib.contextmanager
def python_state_preserved() -> Iterator[None]:
    """Disable garbage collection, and import and draw apart from the program.

    Scalar random draws are pinned (``scalar_randomness``).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with (
            private_generators(),
            torch.enable_grad(),
            imports_outside_modes(),
            pinned_scalar_draws(),
        ):
            yield
    finally:
        if was_enabled:
            gc.enable()
