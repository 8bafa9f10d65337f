"""Run training steps on fake tensors and record them as a RawTrace."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.batches.batch_tree import map_batch, resize_batch
from budgetfit.core.sample_dims import FIRST_DIM, SampleDims
from budgetfit.core.step_trace import CATEGORIES, BlockPass, Phase
from budgetfit.tracing.cuda.op_semantics import CudaOpSemantics, imitate_cuda
from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode
from budgetfit.tracing.fake.result_cache import FakeResultCache
from budgetfit.tracing.isolation.cuda_device_names import CudaDevicesOnCpu
from budgetfit.tracing.isolation.lru_caches import lru_caches_cleared
from budgetfit.tracing.isolation.python_state import python_state_preserved
from budgetfit.tracing.recording.gradient_log import GradientLog
from budgetfit.tracing.recording.loop_recorder import LoopRecorder
from budgetfit.tracing.recording.module_tracker import ModuleTracker
from budgetfit.tracing.recording.raw_trace import (
    LoopRunner,
    RawTrace,
    Runner,
    StepProgram,
)
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.recording.tensor_owners import log_optimizer_state, log_weights
from budgetfit.tracing.values.concrete_execution import weight_values
from budgetfit.tracing.values.known_values import KnownValues
from budgetfit.tracing.values.library_patches import patch_libraries
from budgetfit.utils.user_code import preserve_globals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode

    from budgetfit.core.step_trace import Direction, PhaseName
    from budgetfit.tracing.cuda.target import CudaTarget
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.module_tracker import BlockForward


# Values too large to propagate are assumed only at the batch sizes of an affine trace;
# at larger ones the affine trace is more reliable.
MAX_ASSUMED_BATCH_SIZE = 3


def trace_step(  # noqa: PLR0913 - one value each, all needed
    model: nn.Module,
    program: StepProgram,
    batch: Any,
    *,
    batch_size: int,
    dims: SampleDims = FIRST_DIM,
    blocks: Sequence[str],
    target: CudaTarget | None,
    micro_steps: int = 1,
    steps: int = 1,
    short: Shortening | None = None,
    copy_modules: Callable[[FakeTensorMode, nn.Module], Sequence[nn.Module]]
    | None = None,
    real_values: bool = False,
    redirect_cuda: bool = False,
) -> RawTrace:
    """Run ``steps`` optimizer steps of ``micro_steps`` micro-batches on fake tensors.

    Neither ``model`` nor any global state is changed.

    Args:
        model: Of real, meta or CUDA tensors; a fake copy of it runs.
        program: Prepares the copy for training.
        batch: Any pytree of tensors.
        batch_size: Samples of each micro-batch.
        dims: The sample dimension of each tensor.
        blocks: Module paths of the chain, in the shortened model if ``short``.
        target: The GPU whose semantics are imitated; None for CPU semantics.
        micro_steps: Micro-batches of each step.
        steps: One is enough for a ``Run``: ``append_steady_step`` derives the second.
        short: How to shorten the model.
        copy_modules: Given the fake mode and the fake model, makes fake copies of the
            other modules that the program runs; their tensors are weights as well.
        real_values: Also run the forward on real tensors, for models whose control flow
            depends on tensor values.
        redirect_cuda: Redirect CUDA devices named by the program to the CPU, where the
            fakes are.
    """
    sized = _resized(batch, batch_size, dims, real_values=real_values)
    kinds = map(type, model.modules())
    with (
        python_state_preserved(),
        lru_caches_cleared(model),
        preserve_globals(kinds),
        fake_mode() as mode,
    ):
        values = KnownValues(
            FakeResultCache(mode).run,
            assumes_for_large=batch_size <= MAX_ASSUMED_BATCH_SIZE,
            all_values=real_values,
        )
        fake = fake_copy(model, mode, short, values.record_weight)
        others = () if copy_modules is None else copy_modules(mode, fake)
        semantics, imitation = imitate_cuda(target)
        log = StorageLog(semantics, values.run)
        tracker = ModuleTracker(fake, blocks, log)
        values.where = tracker.current_path
        raw = RawTrace(batch_size=batch_size, log=log, layers=tracker.layers)
        recorder = StepRecorder(fake, log, tracker, values, semantics, raw)
        with (
            contextlib.ExitStack() as at_end,
            imitation,
            CudaDevicesOnCpu() if redirect_cuda else contextlib.nullcontext(),
            patch_libraries(values),
            log,
        ):
            log.on_op = tracker.on_backward_op
            log_weights(fake, log, tracker)
            for other in others:
                log_weights(other, log)
            runner = program(fake, recorder.start_phase)
            at_end.callback(_remove_optimizer_hooks, runner)
            if isinstance(runner, LoopRunner):
                LoopRecorder(recorder, steps, micro_steps).train(runner, sized)
            else:
                recorder.train(runner, sized, steps, micro_steps)
        log.close()
        _recategorize_forward_temporaries(raw)
        raw.notes = sorted(semantics.notes) if semantics is not None else []
        raw.notes += values.note_lines()
        tracker.remove_hooks()
    return raw


_SETUP = Phase("setup", -1, 0, 0, 0)


@dataclass(slots=True)
class StepRecorder:
    """Runs the steps of a fake model, and records phases and block passes."""

    fake: nn.Module
    log: StorageLog
    tracker: ModuleTracker
    values: KnownValues
    semantics: CudaOpSemantics | None
    raw: RawTrace
    phase: Phase = _SETUP
    step: int = 0
    micro_step: int = 0

    def train(self, runner: Runner, batch: Any, steps: int, micro_steps: int) -> None:
        """Run the steps, each micro-step on a batch of new tensors."""
        log, tracker, raw = self.log, self.tracker, self.raw
        log_weights(self.fake, log, tracker)  # a dtype policy may have replaced them
        raw.gradients = GradientLog(log)
        raw.gradients.register_hooks(self.fake)
        raw.step_start = len(log.events)
        for self.step in range(steps):
            for self.micro_step in range(micro_steps):
                self._micro_step(runner, batch)
                self.note_blocks()
                log_optimizer_state(self.fake, runner, log, tracker)
        self.end_phase()

    def note_blocks(self) -> None:
        """Note the blocks that ran in the first micro-batch, once it has run."""
        if self.step == 0 and self.micro_step == 0:
            runs = self.tracker.runs
            self.raw.blocks = [run.block for run in runs]
            self.raw.joined = [run.joined for run in runs[1:]]

    def _micro_step(self, runner: Runner, batch: Any) -> None:
        self.start_phase("forward")  # the batch is allocated in the step that frees it
        runner.step(self.new_batch(batch))

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
        self.raw.phases.append(phase)

    def _add_backward_passes(self, phase: Phase) -> None:
        """Add the block passes of a micro-batch's backward.

        It visits the block runs of the forward in reverse; each pass begins at its
        first op and lasts until the next begins.
        """
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


def _resized(
    batch: Any,
    batch_size: int,
    dims: SampleDims,
    *,
    real_values: bool,
) -> Any:
    """Return the batch with ``batch_size`` samples, and the values that a trace needs.

    Called outside the fake mode, in which added samples would have no values.
    """
    if not real_values:
        return resize_batch(_integers_only(batch), batch_size, dims=dims)
    # All samples are the first, so that control flow is the same for each.
    real = map_batch(batch, lambda x: weight_values(_on_cpu(x)))
    return resize_batch(real, batch_size, dims=dims, of_first=1)


def _remove_optimizer_hooks(runner: Runner | LoopRunner) -> None:
    """Remove an optimizer's hooks from the fakes: their reference cycle would leak."""
    remove_hooks = getattr(runner.optimizer, "remove_hooks", None)
    if remove_hooks is not None:
        remove_hooks()


def _integers_only(batch: Any) -> Any:
    """Move floating-point tensors to meta; keep integers, which models may read."""

    def without_floats(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.device.type == "meta":
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        return _on_cpu(tensor)

    return map_batch(batch, without_floats)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.detach().cpu()


def _recategorize_forward_temporaries(raw: RawTrace) -> None:
    """Turn activations that are freed within their forward into temporaries."""
    activations, temporaries = (
        CATEGORIES.index(name) for name in ("activations", "temporaries")
    )
    categories = raw.log.categories
    for phase in raw.phases:
        if phase.name == "forward":
            for event in raw.log.events[phase.start : phase.end]:
                if event < 0 and categories[-event - 1] == activations:
                    categories[-event - 1] = temporaries
