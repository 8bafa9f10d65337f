"""Find the storages of logits and loss: allocated after the last block.

A model's class computes its loss in its own forward, and a user's loss function runs in
no module. Without this, these bytes would be reported under the whole model.
"""

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import StepTrace

LOSS: Final = "loss"  # allocated outside of all modules
LOGITS_AND_LOSS: Final = "logits and loss"  # allocated by the model's own forward


@lru_cache(maxsize=16)
def loss_storages(trace: StepTrace) -> NDArray[np.bool_]:
    """Return for each storage whether it belongs to the logits or the loss.

    That is: allocated between a micro-batch's last block forward and first block
    backward, by a module that contains blocks or by none. All False without blocks.
    """
    found = np.zeros(len(trace.layer), np.bool_)
    above = {""} | {
        name[:end]
        for name in trace.blocks
        for end, letter in enumerate(name)
        if letter == "."
    }
    holders = {-1} | {n for n, path in enumerate(trace.layers) if path in above}
    events = trace.events.astype(np.int64)
    for start, end in _after_blocks(trace):
        inside = events[start:end]
        found[inside[inside > 0] - 1] = True
    return found & np.isin(trace.layer, list(holders))


def _after_blocks(trace: StepTrace) -> list[tuple[int, int]]:
    """Return the event range after the blocks of each micro-batch."""
    ends: dict[tuple[int, int], int] = {}
    starts: dict[tuple[int, int], int] = {}
    for row in trace.passes:
        key = row.step, row.micro_step
        if row.direction == "forward":
            ends[key] = max(ends.get(key, 0), row.end)
        else:
            starts[key] = min(starts.get(key, row.start), row.start)
    return [(end, starts[key]) for key, end in ends.items() if key in starts]
