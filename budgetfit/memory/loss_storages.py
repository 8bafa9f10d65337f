"""Which storages are logits and loss: what is made behind the last block.

A model's class computes its loss in its own forward, and a loss of the user's runs in
no module at all. By their layer alone these bytes would be those of the whole model.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from budgetfit.core.step_trace import StepTrace

LOSS: Final = "loss"  # made by no module
LOGITS_AND_LOSS: Final = "logits and loss"  # by the model's own forward


@lru_cache(maxsize=16)
def loss_storages(trace: StepTrace) -> NDArray[np.bool_]:
    """Return for each storage whether it is part of the logits or the loss.

    That is: made between a micro-batch's last forward of a block and its first
    backward of one, by a module that holds blocks or by none. Without blocks nothing
    is known to be.
    """
    found = np.zeros(len(trace.layer), np.bool_)
    holders = {-1} | {
        index
        for index, path in enumerate(trace.layers)
        if any(name.startswith(f"{path}." if path else "") for name in trace.blocks)
    }
    events = trace.events.astype(np.int64)
    for start, end in _behind_the_blocks(trace):
        made = events[start:end]
        found[made[made > 0] - 1] = True
    return found & np.isin(trace.layer, list(holders))


def _behind_the_blocks(trace: StepTrace) -> list[tuple[int, int]]:
    """Return stretches of events, one for each micro-batch."""
    ends: dict[tuple[int, int], int] = {}
    starts: dict[tuple[int, int], int] = {}
    for row in trace.passes:
        key = row.step, row.micro_step
        if row.direction == "forward":
            ends[key] = max(ends.get(key, 0), row.end)
        else:
            starts[key] = min(starts.get(key, row.start), row.start)
    return [(end, starts[key]) for key, end in ends.items() if key in starts]
