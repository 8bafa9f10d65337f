"""The judge: an ``Estimate`` from a trace by allocator replay and kernel times."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from budgetfit.applying.optimizers.factory import optimizer_notes
from budgetfit.calibration.known_measurements import time_factor
from budgetfit.core.budget import Budget
from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.core.plan import Estimate
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe, selective_blocks
from budgetfit.core.step_trace import StepTrace
from budgetfit.gpus.table import Gpu
from budgetfit.memory.host_copies import host_state_bytes, step_host_bytes
from budgetfit.memory.replay import (
    UNLIMITED_BYTES,
    device_properties,
    replay,
    storage_bytes,
)
from budgetfit.memory.scratch_sizes.rules import round_up
from budgetfit.timing.collectives import NetworkTime, network_time
from budgetfit.timing.kernel_times import OpTimes, StepTime, op_times, step_time_ns
from budgetfit.timing.step_time_range import step_time_range
from budgetfit.utils.format_bytes import format_bytes

OFFLOADED_NOTE: Final = (
    "the optimizer's step on the CPU is estimated for one thread of each rank, as "
    "torchrun starts it: OMP_NUM_THREADS sets more"
)
MIN_PEAK_SHARE: Final = 0.01  # of the peak: ops are named that hold more
ALLOCATOR_BLOCK_BYTES: Final = 512  # the allocator's rounding


def judge(  # noqa: PLR0913 - one value each, all needed
    trace: StepTrace,
    recipe: Recipe,
    gpu: Gpu,
    budget: Budget,
    *,
    context_bytes: int,
    notes: tuple[str, ...] = (),
    replayed: StepTrace | None = None,
    most_retries: int = 0,
) -> Estimate:
    """Replay ``trace`` at the recipe's batch size: memory, time and whether it fits.

    It fits when training within the budget's usable bytes never empties the allocator's
    cache nor runs out of memory: when the replay without a limit reserves no more. The
    numbers are those of the replay without a limit, unless loading alone reserves more:
    then the cache is emptied once, before the first step. ``replayed``: instead of
    ``trace``, which has the times, with what happens between its steps; for that the
    cache may be emptied ``most_retries`` times, if training alone fits.
    """
    run = partial(
        replay,
        batch_size=recipe.batch_size,
        gpu=gpu,
        settings=budget.allocator,
        micro_steps=recipe.gradient_accumulation_steps,
    )
    timeline, unlimited_bytes = _replayed_within(
        budget, run, trace, replayed, most_retries
    )
    if timeline.retries:
        notes = (*notes, _emptied_note(timeline.retries, unlimited_bytes))
    reserved_bytes = timeline.reserved_bytes
    host_bytes = step_host_bytes(trace, recipe.batch_size)
    # A limit changes nothing before the first request that goes beyond it.
    fits = budget.holds(reserved_bytes, host_bytes)
    times, time_note = _step_times(trace, recipe, gpu)
    nccl = budget.nccl
    process_range_bytes, process_note = budget.process_range(reserved_bytes)
    return Estimate(
        recipe=recipe,
        allocated_bytes=timeline.allocated_bytes,
        reserved_bytes=reserved_bytes,
        process_bytes=reserved_bytes + context_bytes + (nccl.high_bytes if nccl else 0),
        phase_peaks_bytes=timeline.phase_peaks_bytes,
        at_peak_bytes=timeline.at_peak_bytes,
        timeline=timeline,
        notes=(
            *trace.notes,
            *unverified_op_notes(
                trace, recipe.batch_size, gpu, timeline.allocated_bytes
            ),
            *optimizer_notes(recipe.optimizer, recipe.engine),
            *([OFFLOADED_NOTE] if recipe.cpu_offload else ()),
            *notes,
            *([process_note] if process_note else ()),
            time_note,
        ),
        fits=fits,
        usable_bytes=budget.usable_bytes,
        process_range_bytes=process_range_bytes,
        host_bytes=host_bytes,
        unpinned_bytes=host_state_bytes(trace),
        nccl_bytes=(nccl.low_bytes, nccl.high_bytes) if nccl else None,
        **times,
    )


def _step_times(
    trace: StepTrace, recipe: Recipe, gpu: Gpu
) -> tuple[dict[str, Any], str]:
    """Return the times of an ``Estimate``, and what they are based on."""
    measured = time_factor(gpu, recipe.precision)
    ratio = measured.ratio if measured is not None else 1.0
    micro_steps = recipe.gradient_accumulation_steps
    times = times_of_ops(trace, recipe, gpu)
    time = step_time_ns(trace, times.times_ns)
    step_ms = time.total_ns(micro_steps) / 1e6 * ratio
    expected = step_time_range(trace, times, gpu)
    low_ms, high_ms = step_ms * expected.low, step_ms * expected.high
    found: dict[str, Any] = {
        "optimizer_ms": time.optimizer_ns / 1e6 * ratio,
        "time_factor": ratio,
    }
    network = network_of(trace, times, recipe, gpu, micro_steps)
    if network is not None:
        found |= {"network_ms": network.expected_ns / 1e6, "network": network.link}
        step_ms += network.expected_ns / 1e6
        low_ms += network.low_ns / 1e6
        high_ms += network.high_ns / 1e6
    found |= {"step_ms": step_ms, "step_range_ms": (low_ms, high_ms)}
    return found, expected.note if measured is None else measured.note


def _replayed_within(
    budget: Budget,
    run: Callable[..., MemoryTimeline],
    training: StepTrace,
    replayed: StepTrace | None,
    most_retries: int,
) -> tuple[MemoryTimeline, int]:
    """Return the replay to judge by, and what one without a limit reserves."""
    program = training if replayed is None else replayed
    timeline = run(program, limit_bytes=UNLIMITED_BYTES)
    unlimited_bytes = timeline.reserved_bytes
    if most_retries:
        alone = run(training, limit_bytes=UNLIMITED_BYTES)
        if alone.reserved_bytes > budget.usable_bytes:
            most_retries = 0
    emptied_bytes = unlimited_bytes if most_retries else timeline.loading_reserved_bytes
    if emptied_bytes > budget.usable_bytes:
        limited = run(program, limit_bytes=budget.usable_bytes)
        if limited.failed_bytes is None and limited.retries <= most_retries:
            timeline = limited
    return timeline, unlimited_bytes


def _emptied_note(retries: int, unlimited_bytes: int) -> str:
    return (
        "the allocator empties its cache where training and evaluation take turns "
        f"(num_alloc_retries {retries}): else {format_bytes(unlimited_bytes)} would be "
        "reserved"
    )


def network_of(
    trace: StepTrace, times: OpTimes, recipe: Recipe, gpu: Gpu, micro_steps: int
) -> NetworkTime | None:
    """Return what a step of so many micro-batches waits for; None on one GPU."""
    if recipe.parallelism is None:
        return None
    return network_time(trace, times.times_ns, recipe.parallelism, gpu, micro_steps)


def step_time(trace: StepTrace, recipe: Recipe, gpu: Gpu) -> StepTime:
    """Return the times of one micro-batch and of the optimizer step."""
    return step_time_ns(trace, times_of_ops(trace, recipe, gpu).times_ns)


def times_of_ops(trace: StepTrace, recipe: Recipe, gpu: Gpu) -> OpTimes:
    """Return what each op of a recipe's trace takes."""
    return op_times(
        trace,
        recipe.batch_size,
        gpu,
        tf32=find_precision(recipe.precision).tf32,
        selective_blocks=selective_blocks(recipe.segments),
        micro_steps=recipe.gradient_accumulation_steps,
        nodes=recipe.parallelism.nodes if recipe.parallelism else 1,
    )


def unverified_op_notes(
    trace: StepTrace, batch_size: int, gpu: Gpu, peak_bytes: int
) -> tuple[str, ...]:
    """Name the ops that held or read more than 1 % of the peak without a verified rule.

    An op counts with the largest sum of its live outputs and workspaces; one with small
    results, as a median, with its tensors: its scratch may be as large. The largest
    comes first; () if there is none.
    """
    least = MIN_PEAK_SHARE * peak_bytes
    found = {}
    for name, size in held_bytes(trace, batch_size, gpu).items():
        moved = moved_bytes(trace, name, batch_size)
        if size > least:
            found[name] = "allocated", size
        elif moved > least:
            found[name] = "read or wrote", moved
    if not found:
        return ()
    rows = [
        f"{name} {what} {format_bytes(size)} ({size / peak_bytes:.0%} of the peak)"
        for name, (what, size) in sorted(
            found.items(), key=lambda item: (-item[1][1], item[0])
        )
    ]
    return (f"ops without a verified memory rule: {', '.join(rows)}",)


def moved_bytes(trace: StepTrace, op: str, batch_size: int) -> int:
    """Return the most bytes that one call of an op reads and writes; 0 without one."""
    if op not in trace.op_names:
        return 0
    calls = trace.ops.name == trace.op_names.index(op)
    sizes = trace.ops.bytes_fixed + batch_size * trace.ops.bytes_per_sample
    return int(sizes[calls].max(initial=0))


def held_bytes(trace: StepTrace, batch_size: int, gpu: Gpu) -> dict[str, int]:
    """Return the peak bytes of each unverified op's storages."""
    if not trace.unverified_ops:
        return {}
    sizes = storage_bytes(trace, batch_size, device_properties(gpu))
    blocks = np.array(
        [round_up(size, ALLOCATOR_BLOCK_BYTES) for size in sizes.tolist()]
    )
    storage = np.abs(trace.events) - 1
    change = np.sign(trace.events) * blocks[storage]
    result = {}
    for name, storages in trace.unverified_ops:
        own = np.isin(storage, storages)
        result[name] = int(np.cumsum(np.where(own, change, 0)).max(initial=0))
    return result
