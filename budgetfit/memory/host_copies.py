"""Pinned host memory that a trace's copies to the host take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.core.step_trace import TO_HOST

if TYPE_CHECKING:
    from budgetfit.core.step_trace import StepTrace


def host_copy_bytes(trace: StepTrace, batch_size: int, start: int, end: int) -> int:
    """Return the pinned bytes of what is copied to the host between two events.

    Torch's allocator of pinned memory rounds each request up to a power of two.

    Args:
        trace: Of a step.
        batch_size: Samples per micro-batch.
        start: Event after which the stretch begins.
        end: Event with which it ends.
    """
    if TO_HOST not in trace.op_names:
        return 0
    ops = trace.ops
    here = (ops.name == trace.op_names.index(TO_HOST)) & (
        (ops.event > start) & (ops.event <= end)
    )
    moved = ops.bytes_fixed[here] + ops.bytes_per_sample[here] * batch_size
    return sum(1 << (int(size) - 1).bit_length() for size in moved if size)


def setup_host_bytes(trace: StepTrace, batch_size: int) -> int:
    """Return what is copied before the first step and stays: an optimizer's weights."""
    return sum(
        host_copy_bytes(trace, batch_size, phase.start, phase.end)
        for phase in trace.phases
        if phase.name == "setup"
    )


def step_host_bytes(trace: StepTrace, batch_size: int) -> int:
    """Return the pinned host memory of a step: of one forward pass and the set-up."""
    forward = [phase for phase in trace.phases if phase.name == "forward"][-1]
    return host_copy_bytes(
        trace, batch_size, forward.start, forward.end
    ) + setup_host_bytes(trace, batch_size)
