"""The allocator's cache is emptied before the first step of a run that compiles.

Compiling runs a step whose results are dropped (``Run``), and frees what that left
cached, with what loading and casting the weights had left.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from budgetfit.core.step_trace import EMPTY_CACHE, StepTrace


def with_emptied_cache(trace: StepTrace) -> StepTrace:
    """Return the trace with ``torch.cuda.empty_cache()`` at the end of its setup."""
    setup, *phases = trace.phases
    at = setup.end
    return replace(
        trace,
        events=np.insert(trace.events, at, EMPTY_CACHE),
        phases=(
            setup._replace(end=at + 1),
            *(row._replace(start=row.start + 1, end=row.end + 1) for row in phases),
        ),
        passes=tuple(
            row._replace(start=row.start + 1, end=row.end + 1) for row in trace.passes
        ),
        ops=replace(trace.ops, event=trace.ops.event + (trace.ops.event >= at)),
    )
