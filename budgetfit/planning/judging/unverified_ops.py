"""Notes on ops without a verified memory rule that hold much of the peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from budgetfit.memory.replay import device_properties, storage_bytes
from budgetfit.memory.scratch_sizes.rules import round_up
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.gpus.table import Gpu

MIN_PEAK_SHARE: Final = 0.01  # of the peak
ALLOCATOR_BLOCK_BYTES: Final = 512  # the allocator's rounding


def unverified_op_notes(
    trace: StepTrace, batch_size: int, gpu: Gpu, peak_bytes: int
) -> tuple[str, ...]:
    """Name the ops that held more than 1 % of the peak without a verified rule.

    An op counts with the largest sum of its live outputs and workspaces. The largest
    comes first; () if there is none.
    """
    held = {
        name: size
        for name, size in held_bytes(trace, batch_size, gpu).items()
        if size > MIN_PEAK_SHARE * peak_bytes
    }
    if not held:
        return ()
    rows = [
        f"{name} allocated {format_bytes(size)} ({size / peak_bytes:.0%} of the peak)"
        for name, size in sorted(held.items(), key=lambda item: (-item[1], item[0]))
    ]
    return (f"ops without a verified memory rule: {', '.join(rows)}",)


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
