"""The live bytes of a plan's step as a CPU runs it, for checks without a card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.memory.replay_schedule import stretches
from budgetfit.traces.traced_step import traced_step
from budgetfit.tracing.recording.batch_scaling import step_trace

if TYPE_CHECKING:
    from budgetfit.core.plan import Plan
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.workload.model_and_batch import RealProgram


def cpu_timeline_if_possible(
    plan: Plan, program: RealProgram, notes: list[str]
) -> MemoryTimeline | None:
    """Return the replay for a CPU; None, and a note, where there is none.

    Fake tensors refuse on a CPU what real ones do there and what a card does (a grouped
    product in fp32): gradients were compared all the same, and that is worth telling.
    """
    parameters = program.model.parameters()
    if any(hasattr(p, "bnb_quantized") or hasattr(p, "CB") for p in parameters):
        notes.append(
            "Live bytes were not compared: bitsandbytes computes quantised layers on a "
            "CPU otherwise than on a card."
        )
        return None
    try:
        return cpu_timeline(plan, program)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no verdict
        text = " ".join(str(error).split())[:200]
        notes.append(
            "Live bytes were not compared: the step cannot be replayed as a CPU runs "
            f"it ({type(error).__name__}: {text})."
        )
        return None


def cpu_timeline(plan: Plan, program: RealProgram) -> MemoryTimeline:
    """Return the live bytes of the plan's step as a CPU runs it, from a trace."""
    blocks = plan.model.blocks
    raw = traced_step(program, plan.recipe, blocks=blocks, target=None)
    return live_timeline(step_trace(raw, blocks))


def live_timeline(trace: StepTrace) -> MemoryTimeline:
    """Return what is alive in each stretch of a trace; nothing is reserved."""
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
