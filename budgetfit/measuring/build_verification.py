"""Build a ``Verification``: what was measured beside what was predicted."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.core.plan import Plan
from budgetfit.core.verification import PhaseCheck, Verification
from budgetfit.measuring.categories import category_checks
from budgetfit.measuring.compare_gradients import MAX_LEFT_OUT, GradientCheck
from budgetfit.measuring.real_step import RealSteps
from budgetfit.measuring.recomputed_blocks import recomputed_blocks


def build_verification(
    measured: RealSteps,
    plan: Plan,
    timeline: MemoryTimeline,
    gradients: GradientCheck | None,
    notes: Iterable[str] = (),
) -> Verification:
    """Return the ``Verification`` of a measurement against a plan's prediction.

    ``timeline``: the predicted one; its last step stands for all later steps.
    ``gradients`` None: nothing was compared, and no recomputed blocks were seen. On a
    CPU the process's memory and whether it fits are not checked.
    """
    estimate, ranks = plan.estimate, plan.recipe.ranks
    on_cuda = measured.device == "cuda"
    budget = plan.budget if on_cuda else None
    process = measured.last_process
    phases = tuple(_phase_checks(measured, timeline))
    match = gradients.match if gradients else None
    refusal = gradients.refusal if gradients else ""
    peak = max((row.measured_allocated_bytes for row in phases), default=-1)
    whole = measured.out_of_memory is None  # else the peak may not be reached
    return Verification(
        device=measured.device,
        device_name=measured.device_name,
        steps=measured.steps,
        phases=phases,
        predicted_process_bytes=estimate.process_bytes if on_cuda else None,
        measured_process_bytes=measured.process_bytes,
        step_ms=_steady(measured.step_ms),
        first_step_ms=next(iter(measured.step_ms), None),
        predicted_step_ms=estimate.step_ms,
        gradients_match=match,
        max_gradient_error=(
            gradients.max_error
            if gradients and match is not None and not refusal
            else None
        ),
        gradient_noise=gradients.noise if gradients and match is None else None,
        recomputed_blocks=gradients.recomputed_blocks if gradients else 0,
        expected_recomputed_blocks=len(recomputed_blocks(plan.recipe)),
        out_of_memory=measured.out_of_memory,
        notes=(
            *([refusal] if refusal else ()),
            *_left_out_note(gradients),
            *measured.notes,
            *notes,
        ),
        predicted_process_range_bytes=(
            estimate.process_range_bytes if on_cuda else None
        ),
        measured_context_bytes=process.outside_bytes if process else None,
        categories=(
            category_checks(timeline, measured.counted, peak, ranks) if whole else ()
        ),
        usable_bytes=budget.usable_bytes if budget else None,
        room_bytes=budget.usable_bytes + budget.headroom_bytes if budget else None,
        predicted_pinned_bytes=estimate.host_bytes - estimate.unpinned_bytes,
        measured_pinned_bytes=measured.pinned_bytes,
        host_growth_bytes=measured.host_growth_bytes,
        shorter_batches=measured.shorter_batches,
        shorter_reserved_bytes=measured.shorter_reserved_bytes,
        ranks=ranks,
    )


def _left_out_note(gradients: GradientCheck | None) -> Iterator[str]:
    if gradients is not None and (left_out := gradients.left_out):
        yield (
            f"Gradients of {len(left_out)} parameters, {left_out[0]!r} for example, "
            "differ as much between two runs of the unmodified model from equal seeds, "
            f"and hold less than {MAX_LEFT_OUT:.0%} of the squared norm of all: they "
            "were not compared."
        )


def _steady(step_ms: Sequence[float]) -> float:
    """Return the median time of the steps after the first, which initialises states."""
    later = step_ms[1:] or step_ms
    return statistics.median(later) if later else 0.0


def _phase_checks(
    measured: RealSteps, timeline: MemoryTimeline
) -> Iterable[PhaseCheck]:
    predicted: dict[tuple[int, str], tuple[int, int]] = {}
    for point in timeline.points:
        key = (point.step, point.phase)
        known = predicted.get(key, (-1, -1))
        predicted[key] = (
            max(known[0], point.allocated_bytes),
            max(known[1], point.reserved_bytes),
        )
    last = max((step for step, _ in predicted), default=0)
    for row in measured.phases:
        allocated, reserved = predicted.get((min(row.step, last), row.phase), (-1, -1))
        yield PhaseCheck(
            step=row.step,
            phase=row.phase,
            predicted_allocated_bytes=allocated,
            measured_allocated_bytes=row.allocated_bytes,
            predicted_reserved_bytes=reserved,
            measured_reserved_bytes=row.reserved_bytes,
        )
