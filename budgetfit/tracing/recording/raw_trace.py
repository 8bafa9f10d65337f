"""RawTrace: what one run at one batch size logged; protocols of the traced program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from budgetfit.core.step_trace import BlockPass, Phase
from budgetfit.tracing.recording.gradient_log import GradientLog
from budgetfit.tracing.recording.storage_log import StorageLog

if TYPE_CHECKING:
    import torch
    from torch import nn


class StepProgram(Protocol):
    """The traced program (``applying.run.run.Run``): prepares a model for training."""

    def __call__(
        self, model: nn.Module, on_phase: Callable[[str], None]
    ) -> Runner | LoopRunner:
        """Prepare ``model`` and return the runner of its micro-steps."""


class Runner(Protocol):
    """A model that is ready to train."""

    optimizer: torch.optim.Optimizer

    def step(self, batch: Any) -> Any:
        """Run one micro-batch; every n-th call steps the optimizer."""


@runtime_checkable
class LoopRunner(Protocol):
    """A training loop that fetches its batches itself."""

    @property
    def copies(self) -> Sequence[nn.Module]:
        """Further modules whose weights it keeps on the device."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, once the loop has begun."""

    def run(self, load: Callable[[], Any]) -> Any:
        """Train; ``load`` makes a batch on the device, and ends the loop by raising."""


@dataclass(slots=True)
class RawTrace:
    """The log of one run at one batch size; one or two of them become a StepTrace.

    ``ops_before_update`` counts the ops before the first optimizer step;
    ``last_new_step`` is the last one in which the optimizer does something new;
    ``adds_parameters``: whether it takes further parameters after the first.
    ``without_gradient``: names and bytes of trainable parameters that get no gradient;
    ``unread``: names of the batch's tensors that no op reads in the first micro-batch;
    ``derived``: whether micro-batches after the first follow from it.
    """

    batch_size: int
    log: StorageLog
    layers: list[str]
    ops_before_update: int = 0
    last_new_step: int = 1
    adds_parameters: bool = False
    blocks: list[int] = field(default_factory=list)
    joined: list[bool] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    passes: list[BlockPass] = field(default_factory=list)
    random_blocks: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    without_gradient: dict[str, int] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    gives_containers: bool = False
    derived: bool = False
    gradients: GradientLog | None = None

    def copy(self) -> RawTrace:
        """Return a copy that can be extended; nothing in it refers to the model."""
        log, gradients = self.log.copy(), self.gradients
        return replace(
            self,
            log=log,
            phases=self.phases.copy(),
            passes=self.passes.copy(),
            notes=self.notes.copy(),
            gradients=gradients
            and GradientLog(log, gradients.rows, gradients.complete),
        )
