"""What each category takes at the peak: predicted, and counted on the real objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.core.verification import CategoryCheck

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from budgetfit.core.memory_timeline import MemoryTimeline

REST = "activations and the rest"
REST_WITH_GRADIENTS = "gradients, activations, the rest"


def category_checks(
    timeline: MemoryTimeline, counted: Mapping[str, int], measured_peak_bytes: int
) -> tuple[CategoryCheck, ...]:
    """Return a row for each category that can be counted, and one for what is left.

    Gradients are counted when all are there, so they are a row only where the predicted
    peak lies after that; else they are in what is left. Nothing tells where a real
    activation is when the peak comes: all that is left is one row.

    Args:
        timeline: The prediction, with its categories.
        counted: Bytes of ``parameters``, ``buffers``, ``gradients`` and
            ``optimizer_state`` on the device.
        measured_peak_bytes: Allocated on CUDA, live on a CPU; -1 if not measured.
    """
    predicted = timeline.at_peak_bytes
    if not predicted or not counted or measured_peak_bytes < 0:
        return ()
    names = list(_complete(timeline))
    rows = [
        CategoryCheck(
            name=name,
            predicted_bytes=predicted.get(name, 0),
            measured_bytes=counted.get(name, 0),
        )
        for name in names
    ]
    rows = [row for row in rows if row.predicted_bytes or row.measured_bytes]
    rows.append(
        CategoryCheck(
            name=REST if "gradients" in names else REST_WITH_GRADIENTS,
            predicted_bytes=timeline.allocated_bytes
            - sum(row.predicted_bytes for row in rows),
            measured_bytes=measured_peak_bytes
            - sum(row.measured_bytes for row in rows),
        )
    )
    return tuple(rows)


def _complete(timeline: MemoryTimeline) -> Iterator[str]:
    """Yield the categories whose members are all there at the predicted peak."""
    yield "parameters"
    yield "buffers"
    peak = timeline.points[timeline.peak]
    if peak.phase == "optimizer" or peak.micro_step > 0:
        yield "gradients"
    if peak.step > 0:  # the first step makes the state
        yield "optimizer_state"
