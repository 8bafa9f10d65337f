"""A live model and what it trains on: what a plan is proven with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.applying.run.run import Run
from budgetfit.batches.batch_tree import resize_batch
from budgetfit.core.sample_dims import SampleDims

if TYPE_CHECKING:
    from budgetfit.core.recipe import Recipe
    from budgetfit.measuring.protocols import MakeRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RealProgram:
    """A live model and what it is trained on and with.

    ``shorter`` are batches that run after ``batch``, one optimizer step each; ``notes``
    say how ``batch`` was chosen.
    """

    model: nn.Module
    batch: Any
    batch_dims: SampleDims
    loss: Callable[..., Any] | None
    optimizer: Callable[..., torch.optim.Optimizer] | None
    device: torch.device
    shorter: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()

    def run(self, recipe: Recipe, *, checks_values: bool = False) -> MakeRun:
        """Return what makes a run of ``recipe``, for the meters.

        ``checks_values``: whether recomputed blocks are compared with what they were,
        which takes some bytes of its own.
        """

        def make(on_phase: Callable[[str], None]) -> Run:
            return Run(
                self.model,
                recipe,
                loss=self.loss,
                optimizer=self.optimizer,
                device=self.device,
                on_phase=on_phase,
                dims=self.batch_dims,
                determinism_check="values" if checks_values else "default",
            )

        return make

    def sized(self, batch_size: int) -> Any:  # noqa: ANN401
        """Return the batch with so many samples."""
        return resize_batch(self.batch, batch_size, dims=self.batch_dims)
