"""The judge: an ``Estimate`` from a trace by allocator replay and roofline times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.applying.optimizers.factory import optimizer_notes
from budgetfit.calibration.known_measurements import time_factor
from budgetfit.core.plan import Estimate
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import selective_blocks
from budgetfit.memory.host_copies import step_host_bytes
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.planning.judging.unverified_ops import unverified_op_notes
from budgetfit.timing.roofline import op_times_ns, step_time_ns

if TYPE_CHECKING:
    from budgetfit.core.budget import Budget
    from budgetfit.core.recipe import Recipe
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.gpus.table import Gpu

TIME_NOTE = "times are a roofline estimate: good for ranking, not for a schedule"


def judge(  # noqa: PLR0913 - one value each, all needed
    trace: StepTrace,
    recipe: Recipe,
    gpu: Gpu,
    budget: Budget | None,
    *,
    context_bytes: int,
    notes: tuple[str, ...] = (),
) -> Estimate:
    """Replay ``trace`` at the recipe's batch size: memory, time and whether it fits.

    It fits when training within the budget's usable bytes never empties the allocator's
    cache nor runs out of memory: when the replay without a limit reserves no more. The
    numbers are those of the replay without a limit.
    """
    timeline = replay(
        trace,
        recipe.batch_size,
        gpu,
        limit_bytes=UNLIMITED_BYTES,
        micro_steps=recipe.gradient_accumulation_steps,
    )
    host_bytes = step_host_bytes(trace, recipe.batch_size)
    # A limit changes nothing before the first request that goes beyond it.
    fits = budget.holds(timeline.reserved_bytes, host_bytes) if budget else None
    measured = time_factor(gpu, recipe.precision)
    ratio = measured.ratio if measured is not None else 1.0
    return Estimate(
        recipe=recipe,
        allocated_bytes=timeline.allocated_bytes,
        reserved_bytes=timeline.reserved_bytes,
        process_bytes=timeline.reserved_bytes + context_bytes,
        phase_peaks_bytes=timeline.phase_peaks_bytes,
        at_peak_bytes=timeline.at_peak_bytes,
        step_ms=step_ms(trace, recipe, gpu) * ratio,
        timeline=timeline,
        notes=(
            *trace.notes,
            *unverified_op_notes(
                trace, recipe.batch_size, gpu, timeline.allocated_bytes
            ),
            *optimizer_notes(recipe.optimizer),
            *notes,
            *context_notes(budget),
            TIME_NOTE if measured is None else measured.note,
        ),
        fits=fits,
        usable_bytes=budget.usable_bytes if budget else None,
        process_range_bytes=process_range_bytes(timeline.reserved_bytes, budget),
        host_bytes=host_bytes,
        time_factor=ratio,
    )


def process_range_bytes(
    reserved_bytes: int, budget: Budget | None
) -> tuple[int, int] | None:
    """Return the range of expected process memory; None without a CUDA context."""
    context = budget.context if budget is not None else None
    if context is None:
        return None
    return reserved_bytes + context.low_bytes, reserved_bytes + context.high_bytes


def context_notes(budget: Budget | None) -> tuple[str, ...]:
    """Return a note on the source of the CUDA context size, which is not replayed."""
    context = budget.context if budget is not None else None
    if context is None:
        return ()
    return (f"process = reserved + the CUDA context, {context.source}",)


def step_ms(trace: StepTrace, recipe: Recipe, gpu: Gpu) -> float:
    """Return the roofline's time of one optimizer step, all micro-batches included."""
    tf32 = find_precision(recipe.precision).tf32
    times_ns = op_times_ns(
        trace,
        recipe.batch_size,
        gpu,
        tf32=tf32,
        selective_blocks=selective_blocks(recipe.segments),
    )
    steps = recipe.gradient_accumulation_steps
    return step_time_ns(trace, times_ns).total_ns(steps) / 1e6
