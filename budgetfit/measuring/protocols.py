"""Protocols of what measuring gets from other packages as arguments."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class TrainingRun(Protocol):
    """A model that trains by a recipe; ``applying.run.run.Run`` is one."""

    optimizer: torch.optim.Optimizer

    def step(self, batch: object) -> object:
        """Run one micro-batch; every n-th call updates the weights."""

    def undo(self) -> None:
        """Restore the unmodified model."""


# Makes a run that calls a function with forward, backward or optimizer as each begins.
MakeRun = Callable[[Callable[[str], None]], TrainingRun]


class LiveBytes(Protocol):
    """Counter of the live bytes of all storages, the model's own included.

    Attributes:
        peak_bytes: Peak of live bytes since ``reset_peak``.
    """

    live_bytes: int
    peak_bytes: int

    def reset_peak(self) -> None:
        """Start a new peak at the current live bytes."""


# Makes a context in which live bytes are counted, the existing model's included.
MakeLiveBytes = Callable[[], AbstractContextManager[LiveBytes]]
