"""Protocols of what measuring gets from other packages as arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class TrainingRun(Protocol):
    """A model that trains by a recipe; ``applying.run.run.Run`` is one."""

    optimizer: torch.optim.Optimizer

    def step(self, batch: Any) -> object:
        """Run one micro-batch; every n-th call updates the weights."""

    def undo(self) -> None:
        """Restore the unmodified model."""


class MakeRun(Protocol):
    """Factory of a ``TrainingRun``."""

    def __call__(self, on_phase: Callable[[str], None]) -> TrainingRun:
        """Call ``on_phase`` with forward, backward or optimizer as each begins."""


class LiveBytes(Protocol):
    """Counter of the live bytes of all storages, the model's own included.

    Attributes:
        live_bytes: Current live bytes.
        peak_bytes: Peak of live bytes since ``reset_peak``.
    """

    live_bytes: int
    peak_bytes: int

    def reset_peak(self) -> None:
        """Start a new peak at the current live bytes."""


class MakeLiveBytes(Protocol):
    """Factory of a context manager in which a ``LiveBytes`` counts."""

    def __call__(self) -> AbstractContextManager[LiveBytes]:
        """Start counting; the existing model is included."""
