"""One trace: a few training steps of a fake model, logged storage by storage."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.batches.batch_tree import change_tensors, resize_batch
from budgetfit.core.sample_dims import FIRST, SampleDims
from budgetfit.core.step_trace import CATEGORIES, BlockPass, Phase
from budgetfit.tracing.cuda.semantics.context import imitate_cuda
from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode
from budgetfit.tracing.fake.result_cache import FakeResults
from budgetfit.tracing.isolation.cuda_device_names import OneDevice
from budgetfit.tracing.isolation.lru_caches import no_fakes_remembered
from budgetfit.tracing.isolation.python_state import quiet_machine
from budgetfit.tracing.recording.gradient_log import GradientLog
from budgetfit.tracing.recording.module_tracker import BlockTracker
from budgetfit.tracing.recording.raw_trace import RawTrace, Runner, StepProgram
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.recording.tensor_owners import name_survivors, register
from budgetfit.tracing.values.concrete_execution import weight_like
from budgetfit.tracing.values.known_values import KnownValues
from budgetfit.tracing.values.library_patches import values_matter
from budgetfit.utils.user_code import globals_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode

    from budgetfit.tracing.cuda.target import CudaTarget
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.module_tracker import ForwardRun


# Up to the batch sizes of a line (planning.traces) rules stand in for what is too large
# to be followed; beyond, the line is better.
LARGEST_ASSUMING_BATCH = 3


class _PhaseClock:
    """Turns ``on_phase`` calls into stretches of events, and tells the semantics."""

    def __init__(
        self, model: nn.Module, log: StorageLog, tracker: BlockTracker, raw: RawTrace
    ) -> None:
        self._model, self._log = model, log
        self._tracker, self._raw = tracker, raw
        self._open = Phase("setup", -1, 0, 0, 0)
        self.semantics: Any = None
        self.values: KnownValues | None = None
        self.step, self.micro_step = 0, 0

    def start(self, name: str) -> None:
        """Close the open stretch and begin ``name``."""
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
        """End the open stretch here."""
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
                self._log.belongs_to(parameter.grad, parameter)


def _forward_passes(tracker: BlockTracker, phase: Phase) -> list[BlockPass]:
    """Return the block passes of the micro-batch whose forward this is."""
    return [_block_pass(run, phase, run.start, run.end) for run in tracker.runs]


def _backward_passes(tracker: BlockTracker, phase: Phase) -> list[BlockPass]:
    """Return the block passes of the micro-batch whose backward this is.

    It runs through the forward's stretches in reverse; each begins where its first op
    was seen and lasts until a lower one begins.
    """
    first: dict[int, int] = {}
    for stretch, event in tracker.backward:
        first.setdefault(stretch, event)
    order = sorted(first.items(), key=lambda item: item[1])
    edges = [event for _, event in order] + [phase.end]
    edges[0] = phase.start
    return [
        _block_pass(tracker.runs[stretch], phase, start, end)
        for (stretch, _), start, end in zip(order, edges, edges[1:], strict=False)
        if stretch >= 0
    ]


def _block_pass(run: ForwardRun, phase: Phase, start: int, end: int) -> BlockPass:
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


def trace_once(  # noqa: PLR0913 - one value each, all needed
    model: nn.Module,
    program: StepProgram,
    batch: Any,  # noqa: ANN401 - any pytree of tensors
    *,
    batch_size: int,
    dims: SampleDims = FIRST,
    blocks: Sequence[str],
    target: CudaTarget | None,
    micro_steps: int = 1,
    steps: int = 1,
    short: Shortening | None = None,
    beside: Callable[[FakeTensorMode, nn.Module], Sequence[nn.Module]] | None = None,
    real_values: bool = False,
    one_device: bool = False,
) -> RawTrace:
    """Run ``steps`` optimizer steps of ``micro_steps`` micro-batches on fake tensors.

    ``target`` says which card's semantics to take; None traces what a CPU would do.
    ``model`` is not changed and neither is any global state. One step is enough:
    ``steady_step.repeat_step`` makes the second out of it. With ``short`` a twin with
    fewer blocks runs, and ``blocks`` are its own. ``beside`` makes fake copies of other
    modules that the program runs, given the model's: their tensors are weights as well.
    ``real_values``: the forward is computed with real numbers beside the fakes, for
    models whose numbers decide what they do. ``one_device``: what the program puts on
    CUDA by name is on the CPU, as the fakes are.
    """
    sized = _of_size(batch, batch_size, dims, real_values=real_values)
    kinds = map(type, model.modules())
    with (
        quiet_machine(),
        no_fakes_remembered(model),
        globals_kept(kinds),
        fake_mode() as mode,
    ):
        values = KnownValues(
            FakeResults(mode).run,
            assumes_for_large=batch_size <= LARGEST_ASSUMING_BATCH,
            everything=real_values,
        )
        twin = fake_copy(model, mode, short, values.know_weight)
        others = () if beside is None else beside(mode, twin)
        semantics, imitation = imitate_cuda(target)
        log = StorageLog(semantics, values.run)
        tracker = BlockTracker(twin, blocks, log)
        values.where = tracker.current_path
        raw = RawTrace(batch_size=batch_size, log=log, layers=tracker.layers)
        clock = _PhaseClock(twin, log, tracker, raw)
        clock.semantics, clock.values = semantics, values
        watched = _Watched(twin, log, tracker, values, clock, raw)
        with (
            contextlib.ExitStack() as at_end,
            imitation,
            OneDevice() if one_device else contextlib.nullcontext(),
            values_matter(values),
            log,
        ):
            runner = watched.prepare(program, others)
            at_end.callback(_let_go, runner)
            watched.train(runner, sized, steps, micro_steps)
        log.close()
        _tell_saved_from_passing(raw)
        raw.notes = sorted(semantics.notes) if semantics is not None else []
        raw.notes += values.said()
        tracker.remove()
    return raw


@dataclass(frozen=True, slots=True)
class _Watched:
    """A fake model and all that watches it train."""

    twin: nn.Module
    log: StorageLog
    tracker: BlockTracker
    values: KnownValues
    clock: _PhaseClock
    raw: RawTrace

    def prepare(self, program: StepProgram, others: Sequence[nn.Module]) -> Runner:
        """Make the model ready to train, its tensors known by name."""
        twin, log, tracker = self.twin, self.log, self.tracker
        log.watch = tracker.see_backward_op
        register(twin, log, tracker)
        for other in others:
            register(other, log)
        return program(twin, self.clock.start)

    def train(self, runner: Runner, batch: Any, steps: int, micro_steps: int) -> None:  # noqa: ANN401
        """Run the steps, each micro-step on a batch of new tensors."""
        log, tracker, clock, raw = self.log, self.tracker, self.clock, self.raw
        register(self.twin, log, tracker)  # a dtype policy may have replaced them
        raw.gradients = GradientLog(log)
        raw.gradients.watch(self.twin)
        raw.step_start = len(log.events)
        for clock.step in range(steps):
            for clock.micro_step in range(micro_steps):
                self._micro_step(runner, batch)
                if clock.step == 0 and clock.micro_step == 0:
                    raw.blocks = [run.block for run in tracker.runs]
                    raw.joined = [run.joined for run in tracker.runs[1:]]
                name_survivors(self.twin, runner, log, tracker)
        clock.close()

    def _micro_step(self, runner: Runner, batch: Any) -> None:  # noqa: ANN401
        def fresh(tensor: torch.Tensor) -> torch.Tensor:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype
            )
            if tensor.device.type == "cpu":
                with _disable_current_modes():  # the real values, and the model's own
                    self.values.remember(fake, tensor.clone())
            return fake

        self.clock.start("forward")  # so that a step frees all that it allocates
        with self.log.of_category("batch"):
            fakes = change_tensors(batch, fresh)
        runner.step(fakes)


def _of_size(
    batch: Any,  # noqa: ANN401
    batch_size: int,
    dims: SampleDims,
    *,
    real_values: bool,
) -> Any:  # noqa: ANN401
    """Return the batch with so many samples, and the values that the trace needs.

    Outside the fake mode: in it, the rows that are added would have no values.
    """
    if not real_values:
        return resize_batch(_readable(batch), batch_size, dims=dims)
    # All samples are the first one: what is decided is decided alike for each.
    real = change_tensors(batch, lambda x: weight_like(_on_cpu(x)))
    return resize_batch(real, batch_size, dims=dims, of_first=1)


def _let_go(runner: Runner) -> None:
    """Take an optimizer's hooks off the fakes: nothing could collect the circle."""
    remove_hooks = getattr(runner.optimizer, "remove_hooks", None)
    if remove_hooks is not None:
        remove_hooks()


def _readable(batch: Any) -> Any:  # noqa: ANN401
    """Keep shapes and dtypes, and the whole numbers that models may ask about."""

    def readable(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.device.type == "meta":
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        return _on_cpu(tensor)

    return change_tensors(batch, readable)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.detach().cpu()


def _tell_saved_from_passing(raw: RawTrace) -> None:
    """What a forward makes and frees again is temporary; what stays are activations."""
    activations, temporaries = (
        CATEGORIES.index(name) for name in ("activations", "temporaries")
    )
    categories = raw.log.categories
    for phase in raw.phases:
        if phase.name == "forward":
            for event in raw.log.events[phase.start : phase.end]:
                if event < 0 and categories[-event - 1] == activations:
                    categories[-event - 1] = temporaries
