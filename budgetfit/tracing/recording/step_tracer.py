"""Run training steps on fake tensors and record them as a RawTrace."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.batches.batch_tree import map_batch, resize_batch
from budgetfit.core.sample_dims import FIRST_DIM, SampleDims
from budgetfit.core.step_trace import CATEGORIES, BlockPass, Phase
from budgetfit.tracing.cuda.semantics.context import imitate_cuda
from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode
from budgetfit.tracing.fake.result_cache import FakeResultCache
from budgetfit.tracing.isolation.cuda_device_names import CudaDevicesOnCpu
from budgetfit.tracing.isolation.lru_caches import lru_caches_cleared
from budgetfit.tracing.isolation.python_state import python_state_preserved
from budgetfit.tracing.recording.gradient_log import GradientLog
from budgetfit.tracing.recording.module_tracker import ModuleTracker
from budgetfit.tracing.recording.raw_trace import RawTrace, Runner, StepProgram
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.recording.tensor_owners import log_optimizer_state, log_weights
from budgetfit.tracing.values.concrete_execution import weight_values
from budgetfit.tracing.values.known_values import KnownValues
from budgetfit.tracing.values.library_patches import patch_libraries
from budgetfit.utils.user_code import preserve_globals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode

    from budgetfit.tracing.cuda.target import CudaTarget
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.module_tracker import BlockForward


# Values too large to propagate are assumed only at the batch sizes of an affine trace;
# at larger ones the affine trace is more reliable.
MAX_ASSUMED_BATCH_SIZE = 3


class _PhaseRecorder:
    """Turns ``on_phase`` calls into phases of the trace, and informs the semantics."""

    def __init__(
        self, model: nn.Module, log: StorageLog, tracker: ModuleTracker, raw: RawTrace
    ) -> None:
        self._model, self._log = model, log
        self._tracker, self._raw = tracker, raw
        self._open = Phase("setup", -1, 0, 0, 0)
        self.semantics: Any = None
        self.values: KnownValues | None = None
        self.step, self.micro_step = 0, 0

    def start(self, name: str) -> None:
        """End the current phase and begin ``name``."""
        if name == "forward" == self._open.name and not self._tracker.runs:
            return  # opened for the batch already
        self.close()
        if name == "forward":
            self._tracker.start_forward()
        elif name == "backward":
            self._tracker.start_backward()
        if name == "optimizer" and not self._raw.ops_before_update:
            self._raw.ops_before_update = len(self._log.ops)
        position = len(self._log.events)
        self._open = Phase(name, self.step, self.micro_step, position, position)  # type: ignore[arg-type]
        self._log.start_phase(name)
        if self.semantics is not None:
            self.semantics.in_backward = name == "backward"
            self.semantics.in_optimizer = name == "optimizer"
        if self.values is not None:
            self.values.phase = name

    def close(self) -> None:
        """End the current phase here."""
        phase = self._open._replace(end=len(self._log.events))
        if phase.name == "forward":
            self._raw.passes += _forward_passes(self._tracker, phase)
        elif phase.name == "backward":
            self._raw.passes += _backward_passes(self._tracker, phase)
            self._name_gradients()
        self._raw.phases.append(phase)

    def _name_gradients(self) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._log.set_category(parameter.grad, "gradients")
                self._log.inherit_layer(parameter.grad, parameter)


def _forward_passes(tracker: ModuleTracker, phase: Phase) -> list[BlockPass]:
    """Return the block passes of a micro-batch's forward."""
    return [_block_pass(run, phase, run.start, run.end) for run in tracker.runs]


def _backward_passes(tracker: ModuleTracker, phase: Phase) -> list[BlockPass]:
    """Return the block passes of a micro-batch's backward.

    It visits the block runs of the forward in reverse; each pass begins at its first op
    and lasts until the next begins.
    """
    first: dict[int, int] = {}
    for run, event in tracker.backward:
        first.setdefault(run, event)
    order = sorted(first.items(), key=lambda item: item[1])
    edges = [event for _, event in order] + [phase.end]
    edges[0] = phase.start
    return [
        _block_pass(tracker.runs[run], phase, start, end)
        for (run, _), start, end in zip(order, edges, edges[1:], strict=False)
        if run >= 0
    ]


def _block_pass(run: BlockForward, phase: Phase, start: int, end: int) -> BlockPass:
    return BlockPass(
        run.block,
        phase.name,  # type: ignore[arg-type]
        phase.step,
        phase.micro_step,
        start,
        end,
        run.input_storage,
        run.output_storage,
    )


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
        steps: One is enough: ``append_steady_step`` derives the second.
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
        phases = _PhaseRecorder(fake, log, tracker, raw)
        phases.semantics, phases.values = semantics, values
        traced = _TracedModel(fake, log, tracker, values, phases, raw)
        with (
            contextlib.ExitStack() as at_end,
            imitation,
            CudaDevicesOnCpu() if redirect_cuda else contextlib.nullcontext(),
            patch_libraries(values),
            log,
        ):
            runner = traced.prepare(program, others)
            at_end.callback(_remove_optimizer_hooks, runner)
            traced.train(runner, sized, steps, micro_steps)
        log.close()
        _recategorize_forward_temporaries(raw)
        raw.notes = sorted(semantics.notes) if semantics is not None else []
        raw.notes += values.note_lines()
        tracker.remove_hooks()
    return raw


@dataclass(frozen=True, slots=True)
class _TracedModel:
    """A fake model with everything that records its training."""

    fake: nn.Module
    log: StorageLog
    tracker: ModuleTracker
    values: KnownValues
    phases: _PhaseRecorder
    raw: RawTrace

    def prepare(self, program: StepProgram, others: Sequence[nn.Module]) -> Runner:
        """Log the weights and prepare the model for training."""
        log, tracker = self.log, self.tracker
        log.on_op = tracker.on_backward_op
        log_weights(self.fake, log, tracker)
        for other in others:
            log_weights(other, log)
        return program(self.fake, self.phases.start)

    def train(self, runner: Runner, batch: Any, steps: int, micro_steps: int) -> None:
        """Run the steps, each micro-step on a batch of new tensors."""
        log, tracker, phases, raw = self.log, self.tracker, self.phases, self.raw
        log_weights(self.fake, log, tracker)  # a dtype policy may have replaced them
        raw.gradients = GradientLog(log)
        raw.gradients.register_hooks(self.fake)
        raw.step_start = len(log.events)
        for phases.step in range(steps):
            for phases.micro_step in range(micro_steps):
                self._micro_step(runner, batch)
                if phases.step == 0 and phases.micro_step == 0:
                    raw.blocks = [run.block for run in tracker.runs]
                    raw.joined = [run.joined for run in tracker.runs[1:]]
                log_optimizer_state(self.fake, runner, log, tracker)
        phases.close()

    def _micro_step(self, runner: Runner, batch: Any) -> None:
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

        self.phases.start("forward")  # the batch is allocated in the step that frees it
        with self.log.default_category("batch"):
            fakes = map_batch(batch, fresh)
        runner.step(fakes)


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


def _remove_optimizer_hooks(runner: Runner) -> None:
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
