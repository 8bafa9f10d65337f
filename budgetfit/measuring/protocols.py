"""What verifying needs from other rooms: it is handed in, never imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch


class TrainingRun(Protocol):
    """A model that trains by a recipe, as ``applying.run.Run`` is."""

    optimizer: torch.optim.Optimizer

    def step(self, batch: Any) -> object:  # noqa: ANN401 - any nesting of tensors
        """Run one micro-batch; every n-th call updates the weights."""

    def undo(self) -> None:
        """Give the plain model back."""


class MakeRun(Protocol):
    """Prepares the model and returns what trains it."""

    def __call__(self, on_phase: Callable[[str], None]) -> TrainingRun:
        """Call ``on_phase`` with forward, backward or optimizer as each begins."""


class LiveBytes(Protocol):
    """Counts the bytes of all storages that are alive, the model's own included.

    Attributes:
        live_bytes: Alive now.
        peak_bytes: The most that was alive since ``reset_peak``.
    """

    live_bytes: int
    peak_bytes: int

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""


class MakeLiveBytes(Protocol):
    """Returns a context in which a ``LiveBytes`` counts."""

    def __call__(self) -> AbstractContextManager[LiveBytes]:
        """Start counting; the model exists already and is counted by the meter."""
