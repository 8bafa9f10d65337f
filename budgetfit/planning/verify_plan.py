"""Prove a plan with real steps: the program that was traced, run and measured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.applying.run import Run
from budgetfit.core.errors import InputError
from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.memory.step_schedule import stretches
from budgetfit.planning.calibration import (
    card_of,
    remember_context,
    remember_step_time,
)
from budgetfit.planning.loss_modules import FakedLoss, loss_modules_on
from budgetfit.planning.trace_errors import quiet_fakes
from budgetfit.planning.traces import STEADY_MICRO_STEPS
from budgetfit.tracing.affine_trace import step_trace
from budgetfit.tracing.batch_shapes import change_tensors, resize_batch
from budgetfit.tracing.fake_step import trace_once
from budgetfit.tracing.steady_step import repeat_step
from budgetfit.tracing.storage_log import StorageLog
from budgetfit.verifying.compare import (
    GradientCheck,
    build_verification,
    check_gradients,
)
from budgetfit.verifying.kept_model import kept_as_it_was
from budgetfit.verifying.real_step import LEAST_STEPS, find_device, run_real_steps
from budgetfit.verifying.recomputed_blocks import blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.core.gpus import Gpu
    from budgetfit.core.plan import Plan, Verification
    from budgetfit.core.recipe import Recipe
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.verifying.protocols import MakeRun

# The unmodified model must fit beside its own gradients to be compared with.
COMPARED_ON_CUDA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RealProgram:
    """A live model and what it is trained on and with.

    ``shorter`` are batches that run after ``batch``, one optimizer step each; ``notes``
    say how ``batch`` was chosen.
    """

    model: nn.Module
    batch: Any
    batch_dim: int
    loss: Callable[..., Any] | None
    optimizer: Callable[..., torch.optim.Optimizer] | None
    device: torch.device
    shorter: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()

    def run(self, recipe: Recipe) -> MakeRun:
        """Return what makes a run of ``recipe``, for the meters."""

        def make(on_phase: Callable[[str], None]) -> Run:
            return Run(
                self.model,
                recipe,
                loss=self.loss,
                optimizer=self.optimizer,
                device=self.device,
                on_phase=on_phase,
            )

        return make

    def sized(self, batch_size: int) -> Any:  # noqa: ANN401
        """Return the batch with so many samples."""
        return resize_batch(self.batch, batch_size, batch_dim=self.batch_dim)


def verify_plan(
    plan: Plan,
    program: RealProgram,
    *,
    steps: int,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Run real steps of a plan, measure them and compare gradients.

    Raises:
        InputError: If there are too few steps, or no such device.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < LEAST_STEPS:
        raise InputError(
            f"steps must be a whole number of at least {LEAST_STEPS}, got {steps!r}: "
            "the optimizer's state appears in the first one, the steady peak in the "
            "second."
        )
    say = progress or (lambda _: None)
    device = find_device(program.device)
    on_cuda = device.type == "cuda"
    recipe = plan.recipe
    batch = program.sized(recipe.batch_size)
    if on_cuda:
        _clear_card()
    with loss_modules_on(device, program.loss, program.model) as beside:
        # Measured first: what other runs leave behind would be found in the peaks.
        with kept_as_it_was(program.model, device):
            say(f"running {steps} real steps of batch {recipe.batch_size}")
            counted = (program.model, *beside)
            measured = run_real_steps(
                program.run(recipe),
                batch,
                steps=steps,
                micro_steps=recipe.gradient_accumulation_steps,
                device=device,
                live_bytes=None if on_cuda else lambda: _live_bytes(counted, batch),
                shorter=program.shorter,
            )
        with kept_as_it_was(program.model, device):
            say("comparing gradients with the unmodified model")
            gradients = _compare(plan, program, on_cuda=on_cuda)
    timeline: MemoryTimeline | None = plan.estimate.timeline
    notes: list[str] = list(program.notes)
    if on_cuda:
        notes.append(remember_context(measured.last_process, card_of(device)))
    else:
        say("replaying the step with the CPU's semantics")
        timeline = _cpu_timeline_if_possible(plan, program, notes)
    if timeline is None:
        timeline = plan.estimate.timeline
        measured = replace(measured, phases=())  # nothing to compare them with
    check = build_verification(
        measured,
        timeline=timeline,
        predicted_process_bytes=plan.estimate.process_bytes if on_cuda else None,
        predicted_process_range_bytes=(
            plan.estimate.process_range_bytes if on_cuda else None
        ),
        predicted_step_ms=plan.estimate.step_ms,
        gradients=gradients,
        expected_recomputed_blocks=len(blocks_of(recipe)),
        notes=notes,
        budget=plan.budget if on_cuda else None,
        predicted_pinned_bytes=plan.estimate.host_bytes,
    )
    return with_step_time(check, plan, card_of(device) if on_cuda else None)


def with_step_time(check: Verification, plan: Plan, gpu: Gpu | None) -> Verification:
    """Say what the prediction of the step's time was, and keep what was measured.

    Args:
        check: All but the time.
        plan: What was predicted.
        gpu: The card that the steps ran on; None on a CPU, whose times say nothing.
    """
    if gpu is None:
        return check
    return replace(
        check,
        time_factor=plan.estimate.time_factor,
        notes=(*check.notes, remember_step_time(check, plan, gpu)),
    )


def _cpu_timeline_if_possible(
    plan: Plan, program: RealProgram, notes: list[str]
) -> MemoryTimeline | None:
    """Return the replay for a CPU; None, and a note, where there is none.

    Fake tensors refuse on a CPU what real ones do there and what a card does (a grouped
    product in fp32): gradients were compared all the same, and that is worth telling.
    """
    try:
        with quiet_fakes():
            return cpu_timeline(plan, program)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no verdict
        text = " ".join(str(error).split())[:200]
        notes.append(
            "Live bytes were not compared: the step cannot be replayed as a CPU runs "
            f"it ({type(error).__name__}: {text})."
        )
        return None


def _clear_card() -> None:
    """Give back what earlier runs of this process keep: cache and cuBLAS workspaces.

    A workspace stays with its thread and pins the segment that it is in.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - it has no public name
    torch.cuda.empty_cache()


def _compare(
    plan: Plan, program: RealProgram, *, on_cuda: bool
) -> GradientCheck | None:
    """Compare gradients; None where even the unmodified model has no room."""
    # Gradients that an optimizer in backward has used up are none to compare.
    single = replace(
        plan.recipe, gradient_accumulation_steps=1, optimizer_in_backward=False
    )
    size = single.batch_size
    if on_cuda:
        size = min(size, COMPARED_ON_CUDA)
    try:
        return check_gradients(
            program.model,
            program.run(single),
            program.run(replace(single, segments=())),
            program.sized(size),
            blocks=plan.model.blocks,
            planned=blocks_of(plan.recipe),
        )
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


@contextlib.contextmanager
def _live_bytes(
    modules: Sequence[nn.Module],
    batch: Any,  # noqa: ANN401
) -> Iterator[StorageLog]:
    """Count the bytes of all storages that are alive, the models' and batch's too."""
    log = StorageLog()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        log.born(tensor, "batch")
        return tensor

    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            log.born(tensor, "parameters")
    change_tensors(batch, count)
    with log:
        yield log


def cpu_timeline(plan: Plan, program: RealProgram) -> MemoryTimeline:
    """Return the live bytes of the plan's step as a CPU runs it, from a trace."""
    recipe = plan.recipe
    micro_steps = min(recipe.gradient_accumulation_steps, STEADY_MICRO_STEPS)
    traced = replace(recipe, gradient_accumulation_steps=micro_steps)
    loss = FakedLoss(program.loss, program.model)

    def make(model: nn.Module, on_phase: Callable[[str], None]) -> Run:
        return Run(
            model,
            traced,
            loss=loss.loss,
            optimizer=program.optimizer,
            on_phase=on_phase,
        )

    raw = trace_once(
        program.model,
        make,
        program.batch,
        batch_size=recipe.batch_size,
        batch_dim=program.batch_dim,
        blocks=plan.model.blocks,
        target=None,
        micro_steps=micro_steps,
        beside=loss.fake,
    )
    repeat_step(raw)
    trace = step_trace(raw, plan.model.blocks)
    after = [0]
    for event in trace.events.tolist():
        size = int(trace.fixed_bytes[abs(event) - 1])
        after.append(after[-1] + (size if event > 0 else -size))
    points = tuple(
        TimelinePoint(
            step=stretch.step,
            micro_step=stretch.micro_step,
            phase=stretch.phase,
            block=trace.block_names[stretch.block] if stretch.block >= 0 else "",
            allocated_bytes=max(after[stretch.start : stretch.end + 1]),
            reserved_bytes=-1,
        )
        for stretch in stretches(trace)
    )
    peak = max(range(len(points)), key=lambda k: points[k].allocated_bytes)
    return MemoryTimeline(
        points=points,
        allocated_bytes=points[peak].allocated_bytes,
        reserved_bytes=-1,
        at_peak_bytes=_categories_at(trace, after.index(max(after))),
        peak=peak,
    )


def _categories_at(trace: StepTrace, events: int) -> dict[str, int]:
    """Return what is alive after so many events, by category."""
    live: dict[str, int] = {}
    for event in trace.events[:events].tolist():
        storage = abs(event) - 1
        name = CATEGORIES[trace.category[storage]]
        size = int(trace.fixed_bytes[storage])
        live[name] = live.get(name, 0) + (size if event > 0 else -size)
    return {name: size for name, size in live.items() if size}
