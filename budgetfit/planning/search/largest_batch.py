"""The largest batch that fits, with few questions to the judge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.memory.chain.live_bytes import LiveCurve
from budgetfit.solvers.batch_size_grid import bisect

if TYPE_CHECKING:
    from collections.abc import Callable

    from budgetfit.core.step_trace import StepTrace
    from budgetfit.memory.kernel_rules.workspaces import KernelCard


def largest_up_to(fits: Callable[[int], bool], bound: int) -> int:
    """Return the largest number up to ``bound`` that fits; nearly always close to it.

    Goes down from the bound in steps that double, then halves the last one.
    """
    too_many, step, enough = bound + 1, 1, bound
    while enough > 0 and not fits(enough):
        too_many, enough = enough, max(0, enough - step)
        step *= 2
    return bisect(fits, enough, too_many)


def live_bound(
    trace: StepTrace, card: KernelCard, limit_bytes: int, most: int = 1 << 16
) -> int:
    """Return the largest batch whose live bytes alone are within a limit; 0 for none.

    What is reserved is never less, so no larger batch fits. The trace must hold for all
    batch sizes.
    """

    def fits(batch_size: int) -> bool:
        curve = LiveCurve.of(trace, batch_size, card, tails=False)
        return int(curve.after.max()) <= limit_bytes

    fitting, failing = 0, 1
    while failing <= most and fits(failing):
        fitting, failing = failing, failing * 2
    return bisect(fits, fitting, failing)
