"""RawTrace: what one run at one batch size logged; protocols of the traced program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from budgetfit.core.step_trace import BlockPass, Phase
from budgetfit.tracing.recording.gradient_log import GradientLog
from budgetfit.tracing.recording.storage_log import StorageLog

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


class StepProgram(Protocol):
    """The traced program (``applying.run.run.Run``): prepares a model for training."""

    def __call__(self, model: nn.Module, on_phase: Callable[[str], None]) -> Runner:
        """Prepare ``model`` and return the runner of its micro-steps."""


class Runner(Protocol):
    """A model that is ready to train."""

    optimizer: torch.optim.Optimizer

    def step(self, batch: Any) -> Any:
        """Run one micro-batch; every n-th call steps the optimizer."""


@dataclass(slots=True)
class RawTrace:
    """The log of one run at one batch size; one or two of them become a StepTrace.

    ``ops_before_update`` counts the ops before the first optimizer step.
    """

    batch_size: int
    log: StorageLog
    layers: list[str]
    step_start: int = 0
    ops_before_update: int = 0
    blocks: list[int] = field(default_factory=list)
    joined: list[bool] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    passes: list[BlockPass] = field(default_factory=list)
    random_blocks: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    gradients: GradientLog | None = None
