"""``verify_plan``: run real training steps of a plan and measure them."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from budgetfit.applying.allocator_settings import other_settings
from budgetfit.applying.out_of_memory.error import free_memory
from budgetfit.applying.precision import computes_in
from budgetfit.applying.torch_compile import compiled_modules, disable_compile
from budgetfit.applying.undo import Undo
from budgetfit.calibration.known_measurements import (
    gpu_of_device,
    store_context,
    store_step_time,
)
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.core.verification import WITHOUT_COMPILE, Verification
from budgetfit.errors import InputError
from budgetfit.gpus.table import Gpu
from budgetfit.measuring.build_verification import build_verification
from budgetfit.measuring.compare_gradients import (
    COMPARED_ON_CUDA,
    GradientCheck,
    check_gradients,
)
from budgetfit.measuring.preserve_model import preserved_model
from budgetfit.measuring.process_memory import free_bytes
from budgetfit.measuring.real_step import (
    RealSteps,
    check_steps,
    find_device,
    run_real_steps,
)
from budgetfit.measuring.recomputed_blocks import recomputed_blocks
from budgetfit.traces.loss_modules import loss_modules_on
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.verification.cpu_timeline import cpu_timeline_if_possible
from budgetfit.verification.loss_in_parts import with_loss_compared
from budgetfit.verification.loss_of_samples import note_if_no_mean
from budgetfit.verification.ranks import log_existing, measure_ranks
from budgetfit.workload.training_setup import TrainingSetup

_NOT_COMPARED = (
    "Gradients were not compared, and recomputation was not watched: the unmodified "
    "model ran out of memory. Verify with shorter samples, or where nothing else uses "
    "the GPU."
)


def verify_plan(
    plan: Plan,
    setup: TrainingSetup,
    *,
    steps: int,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Run real steps of a plan, measure them and compare gradients.

    Raises:
        InputError: If there are too few steps, or no such device; or the model cannot
            train under the CPU's autocast.
    """
    check_steps(steps)
    say = progress or (lambda _: None)
    device = find_device(setup.device)
    on_cuda = device.type == "cuda"
    timeline = plan.estimate.timeline
    notes = list(setup.notes)
    with contextlib.nullcontext() if on_cuda else _eager(plan, setup, notes) as eager:
        plan = eager or plan
        if plan.recipe.parallelism is not None:
            ranks = measure_ranks(plan, setup, steps, say)
            measured, gradients = ranks.measured, ranks.gradients
            timeline = ranks.timeline or timeline
            notes += ranks.notes
            return build_verification(measured, plan, timeline, gradients, notes)
        with contextlib.nullcontext() if on_cuda else _without_onednn_lstm(setup):
            measured, gradients = _run(plan, setup, steps, say, notes)
    if gradients is None:
        notes.append(_NOT_COMPARED)
    if on_cuda:
        difference = other_settings(plan)
        if difference is not None and not plan.needs_expandable_segments:
            notes.append(difference)  # those the run has set, and put back
        notes.append(store_context(measured.last_process, gpu_of_device(device)))
    else:
        say("replaying the step with the CPU's semantics")
        with _without_onednn_lstm(setup):
            on_cpu = cpu_timeline_if_possible(plan, setup, notes)
        if on_cpu is None:
            measured = replace(measured, phases=())  # there is no prediction for them
        else:
            timeline = on_cpu
    check = build_verification(measured, plan, timeline, gradients, notes)
    return with_recorded_step_time(
        check, plan, gpu_of_device(device) if on_cuda else None
    )


@contextlib.contextmanager
def _without_onednn_lstm(setup: TrainingSetup) -> Iterator[None]:
    """Switch oneDNN off for a model with an LSTM."""
    # Its LSTM saves a workspace whose size only its kernel knows, so that the replay's
    # live bytes would be a fifth to three quarters too few.
    if not any(isinstance(module, nn.LSTM) for module in setup.model.modules()):
        yield
        return
    before = torch._C._get_mkldnn_enabled()  # noqa: SLF001 - flags() warns of tf32
    torch._C._set_mkldnn_enabled(False)  # noqa: SLF001
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)  # noqa: SLF001


@contextlib.contextmanager
def _eager(plan: Plan, setup: TrainingSetup, notes: list[str]) -> Iterator[Plan]:
    """Switch torch.compile off, in the plan and in the model, and say so."""
    # On a CPU it generates other code, and none where live bytes are counted: dynamo
    # compiles nothing under a dispatch mode.
    if plan.recipe.compile != "none" or compiled_modules(setup.model):
        notes.append(WITHOUT_COMPILE)
    with Undo() as undo:
        disable_compile(setup.model, undo)
        yield plan.changed(recipe=replace(plan.recipe, compile="none"))
    undo()


def _run(
    plan: Plan,
    setup: TrainingSetup,
    steps: int,
    say: Callable[[str], None],
    notes: list[str],
) -> tuple[RealSteps, GradientCheck | None]:
    """Measure real steps, then compare gradients; the model is restored."""
    # Measured first: memory that other runs leave behind would be in the peaks.
    recipe, device = plan.recipe, setup.device
    on_cuda = device.type == "cuda"
    batch = setup.resized_batch(recipe.batch_size)
    free_memory(device)
    with loss_modules_on(device, setup.loss, setup.model) as loss_modules:
        counted = (setup.model, *loss_modules)
        preserved = functools.partial(
            preserved_model, setup.model, device, loss=setup.loss
        )
        with preserved(), _cpu_autocast_named(recipe, device):
            say(f"running {steps} real steps of batch {recipe.batch_size}")
            if not on_cuda:
                _warn_of_little_memory(plan)
            measured = run_real_steps(
                setup.run_factory(recipe, blocks=plan.model.blocks),
                batch,
                steps=steps,
                micro_steps=recipe.gradient_accumulation_steps,
                device=device,
                live_bytes=None if on_cuda else lambda: _live_bytes(counted, batch),
                shorter=setup.shorter,
                say=say,
            )
        with preserved():
            say("comparing gradients with the unmodified model")
            gradients = _compare(plan, setup, notes, on_cuda=on_cuda)
        with preserved():
            note = note_if_no_mean(setup, recipe)
        notes += [] if note is None else [note]
        return measured, gradients


def _warn_of_little_memory(plan: Plan) -> None:
    """Warn where a step on the CPU needs more than this machine has free."""
    needed, free = plan.estimate.allocated_bytes, free_bytes()
    if free is not None and needed > free:
        warnings.warn(
            f"On the CPU a step of batch {plan.recipe.batch_size} needs about "
            f"{format_bytes(needed)} of memory, and {format_bytes(free)} are free: the "
            "system may end this process. Gradients are checked as well by a plan with "
            "a small batch_size=.",
            stacklevel=2,
        )


@contextlib.contextmanager
def _cpu_autocast_named(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Say of an error that the CPU's autocast is not CUDA's.

    Raises:
        InputError: Instead of the model's RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        if device.type == "cuda" or find_precision(recipe.precision).autocast is None:
            raise
        text = str(error).split("\n", 1)[0].rstrip(".")
        raise InputError(
            f"On the CPU the model cannot train under {recipe.precision}: {text}. "
            "Autocast leaves other ops in fp32 there than on GPUs, where it may train: "
            'verify it there, or a plan with precision="fp32".'
        ) from error


def with_recorded_step_time(
    check: Verification, plan: Plan, gpu: Gpu | None
) -> Verification:
    """Return the verification with its time factor, and store the measured time.

    ``gpu``: the card that the steps ran on; None on a CPU, whose times are not stored.
    """
    if gpu is None:
        return check
    return replace(
        check,
        time_factor=plan.estimate.time_factor,
        notes=(*check.notes, store_step_time(check, plan, gpu)),
    )


def _compare(
    plan: Plan, setup: TrainingSetup, notes: list[str], *, on_cuda: bool
) -> GradientCheck | None:
    """Compare gradients; None where the unmodified model runs out of memory."""
    # An optimizer in backward frees gradients before they could be compared.
    single = replace(
        plan.recipe, gradient_accumulation_steps=1, optimizer_in_backward=False
    )
    size = single.batch_size
    if on_cuda:
        size = min(size, COMPARED_ON_CUDA)
    plain = replace(single, segments=(), compile="none")
    batch = setup.resized_batch(size)
    try:
        found = check_gradients(
            setup.model,
            setup.run_factory(single, blocks=plan.model.blocks, checks_values=True),
            setup.run_factory(plain),
            batch,
            blocks=plan.model.blocks,
            planned=recomputed_blocks(plan.recipe),
            loss=setup.loss,
        )
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    if plain.loss_chunks == 1 or not found.match:
        return found
    return with_loss_compared(
        found,
        setup,
        setup.run_factory,
        plain,
        batch,
        dtype=computes_in(find_precision(plain.precision)),
        notes=notes,
    )


@contextlib.contextmanager
def _live_bytes(
    modules: Sequence[nn.Module],
    batch: object,
) -> Iterator[StorageLog]:
    """Count the live bytes of all storages, including models and batch."""
    log = StorageLog()
    log_existing(log, modules, batch)
    # dynamo compiles nothing under a dispatch mode, and refuses fullgraph=True there
    with torch.compiler.set_stance("force_eager"), log:
        yield log
