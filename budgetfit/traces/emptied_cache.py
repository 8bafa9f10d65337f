"""The allocator's cache is emptied before the first step of a run that compiles.

Compiling runs a step whose results are dropped (``Run``), and frees what that left
cached, with what loading and casting the weights had left.
"""

from __future__ import annotations

from budgetfit.core.step_trace import EMPTY_CACHE, StepTrace


def with_emptied_cache(trace: StepTrace) -> StepTrace:
    """Return the trace with ``torch.cuda.empty_cache()`` at the end of its setup."""
    setup = trace.events[: trace.phases[0].end]
    return trace.with_setup_events((*setup.tolist(), EMPTY_CACHE), ops_from=len(setup))
