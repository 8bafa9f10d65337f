"""Prove a plan with real steps: the program that was traced, run and measured."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.batches.batch_tree import change_tensors
from budgetfit.calibration.known_measurements import (
    card_of,
    remember_context,
    remember_step_time,
)
from budgetfit.errors import InputError
from budgetfit.measuring.compare import (
    GradientCheck,
    build_verification,
    check_gradients,
)
from budgetfit.measuring.preserve_model import kept_as_it_was
from budgetfit.measuring.real_step import LEAST_STEPS, find_device, run_real_steps
from budgetfit.measuring.recomputed_blocks import blocks_of
from budgetfit.traces.loss_modules import loss_modules_on
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.verification.cpu_timeline import cpu_timeline_if_possible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from budgetfit.core.plan import Plan, Verification
    from budgetfit.gpus.table import Gpu
    from budgetfit.measuring.real_step import RealSteps
    from budgetfit.workload.model_and_batch import RealProgram

# The unmodified model must fit beside its own gradients to be compared with.
COMPARED_ON_CUDA = 2


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
    _check_steps(steps)
    say = progress or (lambda _: None)
    device = find_device(program.device)
    on_cuda = device.type == "cuda"
    measured, gradients = _run(plan, program, device, steps, say)
    estimate, timeline = plan.estimate, plan.estimate.timeline
    notes = list(program.notes)
    if on_cuda:
        notes.append(remember_context(measured.last_process, card_of(device)))
    else:
        say("replaying the step with the CPU's semantics")
        on_cpu = cpu_timeline_if_possible(plan, program, notes)
        if on_cpu is None:
            measured = replace(measured, phases=())  # nothing to compare them with
        else:
            timeline = on_cpu
    check = build_verification(
        measured,
        timeline=timeline,
        predicted_process_bytes=estimate.process_bytes if on_cuda else None,
        predicted_process_range_bytes=(
            estimate.process_range_bytes if on_cuda else None
        ),
        predicted_step_ms=estimate.step_ms,
        gradients=gradients,
        expected_recomputed_blocks=len(blocks_of(plan.recipe)),
        notes=notes,
        budget=plan.budget if on_cuda else None,
        predicted_pinned_bytes=estimate.host_bytes,
    )
    return with_step_time(check, plan, card_of(device) if on_cuda else None)


def _check_steps(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < LEAST_STEPS:
        raise InputError(
            f"steps must be a whole number of at least {LEAST_STEPS}, got {steps!r}: "
            "the optimizer's state appears in the first one, the steady peak in the "
            "second."
        )


def _run(
    plan: Plan,
    program: RealProgram,
    device: torch.device,
    steps: int,
    say: Callable[[str], None],
) -> tuple[RealSteps, GradientCheck | None]:
    """Return what real steps took, and how gradients compare; the model stays as it is.

    Measured first: what other runs leave behind would be found in the peaks.
    """
    recipe = plan.recipe
    on_cuda = device.type == "cuda"
    batch = program.sized(recipe.batch_size)
    if on_cuda:
        _clear_card()
    with loss_modules_on(device, program.loss, program.model) as beside:
        counted = (program.model, *beside)
        with kept_as_it_was(program.model, device):
            say(f"running {steps} real steps of batch {recipe.batch_size}")
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
            return measured, _compare(plan, program, on_cuda=on_cuda)


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
            program.run(single, checks_values=True),
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
