"""StepRecorder: runs the steps of a fake model, and records phases and block passes."""

import contextlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.batches.batch_tree import map_batch, named_tensors
from budgetfit.core.samples.sample_dims import SINGLE_TENSOR
from budgetfit.core.step_trace import BlockPass, Direction, Phase, PhaseName
from budgetfit.tracing.cuda.op_semantics import CudaOpSemantics
from budgetfit.tracing.recording.gradient_log import GradientLog
from budgetfit.tracing.recording.module_tracker import BlockForward, ModuleTracker
from budgetfit.tracing.recording.raw_trace import RawTrace, Runner
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.recording.tensor_owners import log_optimizer_state, log_weights
from budgetfit.tracing.values.known_values import KnownValues

_SETUP = Phase("setup", -1, 0, 0, 0)


class EnoughError(Exception):
    """Ends a program: enough of it is recorded."""


@dataclass(slots=True)
class StepRecorder:
    """Runs the steps of a fake model, and records phases and block passes.

    With ``only_forward`` it ends after the first forward.
    """

    fake: nn.Module
    log: StorageLog
    tracker: ModuleTracker
    values: KnownValues
    semantics: CudaOpSemantics | None
    raw: RawTrace
    only_forward: bool = False
    phase: Phase = _SETUP
    step: int = 0
    micro_step: int = 0

    def train(self, runner: Runner, batch: Any, steps: int, micro_steps: int) -> None:
        """Run the steps, each micro-step on a batch of new tensors."""
        log, tracker, raw = self.log, self.tracker, self.raw
        log_weights(self.fake, log, tracker)  # a dtype policy may have replaced them
        raw.gradients = GradientLog(log)
        if steps == micro_steps == 1:  # another is derived from it
            raw.gradients.register_hooks(self.fake)
        with contextlib.suppress(EnoughError):
            for self.step in range(steps):
                for self.micro_step in range(micro_steps):
                    self._micro_step(runner, batch)
                    self.note_blocks()
                    log_optimizer_state(self.fake, runner.optimizer, log, tracker)
            self.end_phase()

    def note_blocks(self) -> None:
        """Note the blocks that ran in the first micro-batch, once it has run."""
        if self.step == 0 and self.micro_step == 0:
            runs = self.tracker.runs
            self.raw.blocks = [run.block for run in runs]
            self.raw.joined = [run.joined for run in runs[1:]]

    def _micro_step(self, runner: Runner, batch: Any) -> None:
        self.start_phase("forward")  # the batch is allocated in the step that frees it
        runner.step(self._with_reads_noted(self.new_batch(batch)))
        if self.log.unread:
            self.raw.unread += self.log.unread.values()
            self.log.unread = {}

    def _with_reads_noted(self, batch: Any) -> Any:
        """Return the batch, and let the log note which of its tensors are read."""
        # Returned, so that the caller needs no name for it: that would keep it alive.
        if self.step == self.micro_step == 0:
            self.log.unread = {
                tensor.untyped_storage()._cdata: name or SINGLE_TENSOR
                for name, tensor in named_tensors(batch)
                if tensor.numel() and tensor.layout is torch.strided
            }
        return batch

    def new_batch(self, batch: Any) -> Any:
        """Return fakes of a batch, newly allocated."""

        def fresh(tensor: torch.Tensor) -> torch.Tensor:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype
            )
            if tensor.device.type == "cpu":
                with (
                    _disable_current_modes()
                ):  # real values, which the model may change
                    self.values.record(fake, tensor.clone())
            return fake

        with self.log.default_category("batch"):
            return map_batch(batch, fresh)

    def start_phase(self, name: str) -> None:
        """End the current phase and begin ``name``: the program's ``on_phase``."""
        if name == "forward" == self.phase.name and not self.tracker.runs:
            return  # opened for the batch already
        self.end_phase()
        if self.only_forward and self.phase.name == "forward":
            self.note_blocks()
            self.log.stop()
            raise EnoughError
        if name == "forward":
            self.tracker.start_forward()
        elif name == "backward":
            self.tracker.start_backward()
        if name == "optimizer" and not self.raw.ops_before_update:
            self.raw.ops_before_update = len(self.log.ops)
        position = len(self.log.events)
        self.phase = Phase(
            cast("PhaseName", name), self.step, self.micro_step, position, position
        )
        self.log.start_phase(name)
        self.log.in_optimizer = name == "optimizer"
        if self.semantics is not None:
            self.semantics.in_backward = name == "backward"
            self.semantics.in_optimizer = name == "optimizer"
        self.values.phase = name

    def end_phase(self) -> None:
        """Record the current phase."""
        phase = self.phase._replace(end=len(self.log.events))
        if phase.name == "forward":
            for run in self.tracker.runs:
                self._add_pass(run, "forward", run.start, run.end)
        elif phase.name == "backward":
            self._add_backward_passes(phase)
            for parameter in self.fake.parameters():
                if parameter.grad is not None:
                    self.log.set_category(parameter.grad, "gradients")
                    self.log.inherit_layer(parameter.grad, parameter)
            if (phase.step, phase.micro_step) == (0, 0):
                self.raw.without_gradient = {
                    name: parameter.nbytes
                    for name, parameter in self.fake.named_parameters()
                    if parameter.requires_grad and parameter.grad is None
                }
        self.raw.phases.append(phase)

    def _add_backward_passes(self, phase: Phase) -> None:
        """Add the block passes of a micro-batch's backward."""
        # It visits the block runs of the forward in reverse; each pass begins at its
        # first op and lasts until the next begins.
        first: dict[int, int] = {}
        for run, event in self.tracker.backward:
            first.setdefault(run, event)
        order = sorted(first.items(), key=lambda item: item[1])
        edges = [event for _, event in order] + [phase.end]
        edges[0] = phase.start
        for (run, _), start, end in zip(order, edges, edges[1:], strict=False):
            if run >= 0:
                self._add_pass(self.tracker.runs[run], "backward", start, end)

    def _add_pass(
        self, run: BlockForward, direction: Direction, start: int, end: int
    ) -> None:
        step, micro_step = self.phase.step, self.phase.micro_step
        storages = run.input_storage, run.output_storage
        self.raw.passes.append(
            BlockPass(run.block, direction, step, micro_step, start, end, *storages)
        )
