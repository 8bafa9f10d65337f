"""Live bytes by category at each point of a replay's timeline, for reports.

Plans are judged without it: it costs a replay and a few passes over the events.
"""

from itertools import chain

import numpy as np

from budgetfit.core.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from budgetfit.core.step_trace import CATEGORIES, StepTrace
from budgetfit.gpus.table import Gpu
from budgetfit.memory.replay import unlimited_replay


def category_bytes(
    trace: StepTrace,
    batch_size: int,
    gpu: Gpu,
    *,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    micro_steps: int = 1,
) -> tuple[dict[str, int], ...]:
    """Return category -> bytes at the peak of each point of ``replay``'s timeline.

    They sum to the point's ``allocated_bytes``. Arguments as for ``replay``.
    """
    parts, events, sizes, allocator = unlimited_replay(
        trace, batch_size, gpu, settings=settings, micro_steps=micro_steps
    )
    ran = [events[part.event_range.start : part.event_range.end] for part in parts]
    runs = [allocator.run(part, sizes) for part in ran]
    happened = np.fromiter(chain.from_iterable(ran), np.int64)
    deltas = np.concatenate([run.deltas for run in runs])
    ends = np.cumsum([len(run.deltas) for run in runs])
    alive = np.concatenate([[0], np.cumsum(deltas)])  # before each event, and at last
    moments = [
        start + int(alive[start : end + 1].argmax())
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    owner = trace.category[np.abs(happened) - 1]
    columns = [
        np.concatenate([[0], np.cumsum(np.where(owner == number, deltas, 0))])[moments]
        for number in range(len(CATEGORIES))
    ]
    return tuple(
        dict(zip(CATEGORIES, row, strict=True))
        for row in np.transpose(columns).astype(np.int64).tolist()
    )
