"""``TrainingSetup``: a live model with its batch, loss, optimizer and device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from budgetfit.applying.run.run import Run
from budgetfit.batches.batch_tree import resize_batch
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.sample_dims import SampleDims
from budgetfit.measuring.protocols import MakeRun


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """A live model with weights, and what it trains on: run by ``verify``.

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

    def run_factory(
        self, recipe: Recipe, *, blocks: Sequence[str] = (), checks_values: bool = False
    ) -> MakeRun:
        """Return a factory of ``Run`` objects that train by ``recipe``.

        ``blocks``: names of the plan's blocks, which a recipe may compile.
        ``checks_values``: whether recomputed values are compared with the original
        ones, which takes some bytes of its own.
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
                blocks=blocks,
                determinism_check="values" if checks_values else "default",
            )

        return make

    def resized_batch(self, batch_size: int) -> object:
        """Return the batch resized to ``batch_size`` samples."""
        return resize_batch(self.batch, batch_size, dims=self.batch_dims)
