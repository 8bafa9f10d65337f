"""CPU memory timeline: live bytes of a plan's step, to verify without a GPU."""

from budgetfit.applying.quantized_layers.stored_weights import has_quantized_weights
from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.core.plan import Plan
from budgetfit.core.step_trace import CATEGORIES, StepTrace
from budgetfit.memory.replay_schedule import event_ranges
from budgetfit.traces.ddp_buckets import with_ddp_buckets
from budgetfit.traces.trace_program import trace_recipe
from budgetfit.tracing.recording.batch_scaling import exact_trace
from budgetfit.workload.training_setup import TrainingSetup


def cpu_timeline_if_possible(
    plan: Plan, setup: TrainingSetup, notes: list[str]
) -> MemoryTimeline | None:
    """Return the timeline for a CPU; None, and a note, where there is none."""
    # Some ops that real CPU and CUDA tensors support fail with fake CPU tensors
    # (grouped matmul in fp32); gradients are still compared then.
    if has_quantized_weights(setup.model):
        notes.append(
            "Live bytes were not compared: bitsandbytes computes quantised layers on a "
            "CPU otherwise than on a card."
        )
        return None
    try:
        return cpu_timeline(plan, setup)
    except Exception as error:  # noqa: BLE001 - no error here fails the verification
        text = " ".join(str(error).split())[:200]
        notes.append(
            "Live bytes were not compared: the step cannot be replayed as a CPU runs "
            f"it ({type(error).__name__}: {text})."
        )
        return None


def cpu_timeline(plan: Plan, setup: TrainingSetup) -> MemoryTimeline:
    """Trace the plan's step with CPU semantics and return its live bytes."""
    blocks = plan.model.blocks
    raw = trace_recipe(setup, plan.recipe, blocks=blocks, target=None)
    trace = exact_trace(raw, blocks)
    return live_timeline(with_ddp_buckets(trace, plan.recipe.parallelism, None))


def live_timeline(trace: StepTrace) -> MemoryTimeline:
    """Return the peak of live bytes in each interval of a trace."""
    after = [0]
    for event in trace.events.tolist():
        size = int(trace.fixed_bytes[abs(event) - 1])
        after.append(after[-1] + (size if event > 0 else -size))
    points = tuple(
        TimelinePoint(
            step=interval.step,
            micro_step=interval.micro_step,
            phase=interval.phase,
            block=trace.block_names[interval.block] if interval.block >= 0 else "",
            allocated_bytes=max(after[interval.start : interval.end + 1]),
            reserved_bytes=-1,
        )
        for interval in event_ranges(trace)
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
    """Return the live bytes by category after so many events."""
    live: dict[str, int] = {}
    for event in trace.events[:events].tolist():
        storage = abs(event) - 1
        name = CATEGORIES[trace.category[storage]]
        size = int(trace.fixed_bytes[storage])
        live[name] = live.get(name, 0) + (size if event > 0 else -size)
    return {name: size for name, size in live.items() if size}
