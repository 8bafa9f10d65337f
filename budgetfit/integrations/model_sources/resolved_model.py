"""ResolvedModel: a model with its name, source and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

_SEED = 0  # random weights, the same in every run


class Materialize(Protocol):
    """Builds the same model with random weights, to verify memory and time."""

    def __call__(
        self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        """Return a new model on ``device``; ``dtype`` None keeps the model's own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model to plan for, and its source.

    Attributes:
        model: The user's own module, or one without trained weights, on meta or CPU.
        name: For reports, for example ``"SmolLM2-1.7B"``.
        source: Where it came from, for reports.
        materialize: Builds it with random weights; None where the user passed the
            module itself.
        dtype_notes: Assumptions about the dtype of its weights; irrelevant where all
            are cast for training.
        frozen_in_compute_dtype: Whether adapters are trained on weights in the dtype of
            the computation, as diffusers' training scripts cast them.
        stored_in: Quantization method of the stored weights, where loading dequantizes
            them; empty for none.
        dequantizer: The config class that does so (``StoredWeights.loader``).
        batch, loss: The example batch, on the CPU, and the loss that a factory returned
            with the model.
    """

    model: nn.Module
    name: str
    source: str
    materialize: Materialize | None = None
    notes: tuple[str, ...] = ()
    dtype_notes: tuple[str, ...] = ()
    frozen_in_compute_dtype: bool = False
    stored_in: str = ""
    dequantizer: str = ""
    batch: Any = None
    loss: Callable[..., Any] | None = None

    def in_dtype(self, weights: torch.dtype) -> ResolvedModel:
        """Return the model, built anew with weights of a dtype."""
        make = self.materialize
        assert make is not None  # noqa: S101 - only models from configs are cast

        def materialize(
            device: torch.device | str = "cpu", dtype: torch.dtype | None = None
        ) -> nn.Module:
            return make(device, dtype or weights)

        return replace(self, model=materialize("meta"), materialize=materialize)


@contextmanager
def fixed_seed(device: torch.device | str) -> Iterator[None]:
    """Seed the random weights; restores the global RNG state."""
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(_SEED)
        yield
