"""The largest batch size that fits, found with few replays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.memory.chain.live_bytes import LiveBytes
from budgetfit.solvers.batch_size_grid import bisect

if TYPE_CHECKING:
    from collections.abc import Callable

    from budgetfit.core.step_trace import StepTrace
    from budgetfit.memory.scratch_sizes.workspaces import DeviceProperties


def largest_fitting(fits: Callable[[int], bool], bound: int) -> int:
    """Return the largest number up to ``bound`` that fits; usually close to it.

    Goes down from the bound in doubling steps, then bisects the last one.
    """
    too_many, step, enough = bound + 1, 1, bound
    while enough > 0 and not fits(enough):
        too_many, enough = enough, max(0, enough - step)
        step *= 2
    return bisect(fits, enough, too_many)


def largest_by_live_bytes(
    trace: StepTrace, card: DeviceProperties, limit_bytes: int, most: int = 1 << 16
) -> int:
    """Return the largest batch size whose live bytes are within a limit; 0 for none.

    Reserved bytes are never less, so no larger batch fits. The trace must be valid for
    all batch sizes.
    """

    def fits(batch_size: int) -> bool:
        curve = LiveBytes.of(trace, batch_size, card, exact_blocks=False)
        return int(curve.after.max()) <= limit_bytes

    fitting, failing = 0, 1
    while failing <= most and fits(failing):
        fitting, failing = failing, failing * 2
    return bisect(fits, fitting, failing)
