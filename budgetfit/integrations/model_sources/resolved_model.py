"""What every way of naming a model ends in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

if TYPE_CHECKING:
    import torch


class Materialise(Protocol):
    """Builds the same model with random weights: enough to verify memory and time."""

    def __call__(
        self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        """Return a new model on ``device``; ``dtype`` None keeps the model's own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model to plan for, and where it came from.

    Attributes:
        model: The user's own module, or one without trained weights, on meta or CPU.
        name: What to call it, for example ``"SmolLM2-1.7B"``.
        source: Where it came from, in words for a report.
        materialise: Builds it with random weights; None where the module that was
            handed in is what is trained.
        notes: What was assumed, in plain words.
        dtype_notes: What was assumed of the dtype of its weights: of no matter where
            all of them are converted to train.
        stored_in: The quantisation that its weights are stored in, of a method that
            is undone as they are loaded; empty for none.
        batch, loss: The example batch, on the CPU, and the loss that a factory returned
            beside the model.
    """

    model: nn.Module
    name: str
    source: str
    materialise: Materialise | None = None
    notes: tuple[str, ...] = ()
    dtype_notes: tuple[str, ...] = ()
    stored_in: str = ""
    batch: Any = None
    loss: Callable[..., Any] | None = None
