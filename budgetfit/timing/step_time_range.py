"""Between which times a step is expected, by how published steps missed predictions.

``benchmarks/step_times.py`` predicts each published step with constants fitted on other
models, and prints how many are inside these ranges.
"""

from typing import Final, NamedTuple

import numpy as np

from budgetfit.core.step_trace import OP_KINDS, StepTrace
from budgetfit.gpus.kernel_shares import find_shares
from budgetfit.gpus.table import Gpu
from budgetfit.timing.kernel_times import Nanoseconds, OpTimes, last_ops

CONVOLUTIONS: Final = np.array(["convolution" in kind for kind in OP_KINDS])
MIN_CONVOLUTION_SHARE: Final = 0.1  # of a step's time


class StepTimeRange(NamedTuple):
    """Factors between the predicted and the shortest and longest expected time.

    Attributes:
        low, high: The factors, below and above 1.
        source: Who took or takes between these times, for a note.
    """

    low: float
    high: float
    source: str

    @property
    def note(self) -> str:
        """Text for a plan's notes."""
        return (
            f"times are estimates: {self.source} {self.low:.2f} to {self.high:.2f} "
            "times as long as predicted"
        )


# Around the 5th and 95th percentiles of measured over predicted: 0.88 and 1.21 of 136
# rows with convolutions, 0.87 and 1.18 of 180 others.
CONVOLUTIONAL: Final = StepTimeRange(
    0.85, 1.3, "nine of ten published steps of convolutional networks took"
)
OTHER: Final = StepTimeRange(
    0.85, 1.25, "nine of ten published steps of networks like this one took"
)
# From four rows (0.94 to 1.38), and hosts that need 12 to 38 microseconds a kernel.
HOST_BOUND: Final = StepTimeRange(
    0.70, 1.80, "waiting for Python to launch kernels may take, as hosts differ,"
)
ASSUMED_RATES: Final = 1.15  # wider by so much for GPUs whose shares are assumed


def step_time_range(trace: StepTrace, times: OpTimes, gpu: Gpu) -> StepTimeRange:
    """Return the range for a step from the times of its ops."""
    ops = np.concatenate(list(last_ops(trace).values()))
    by_kind = np.bincount(trace.ops.kind[ops], times.kernels_ns[ops], len(OP_KINDS))
    return range_of(by_kind.astype(np.float64), gpu, host_bound=times.host_bound)


def range_of(by_kind: Nanoseconds, gpu: Gpu, *, host_bound: bool) -> StepTimeRange:
    """Return the range of a step by the time of its kernels.

    Args:
        by_kind: Of kernels, in the order of ``OP_KINDS``.
        gpu: Its shares are measured, by analogy, or assumed.
        host_bound: Whether it takes as long as the host needs to issue the kernels.
    """
    found = OTHER
    if host_bound:
        found = HOST_BOUND
    elif by_kind[CONVOLUTIONS].sum() > MIN_CONVOLUTION_SHARE * by_kind.sum():
        found = CONVOLUTIONAL
    if not find_shares(gpu).source.startswith("assumed"):
        return found
    return StepTimeRange(
        found.low / ASSUMED_RATES,
        found.high * ASSUMED_RATES,
        f"with 15 % added, as this GPU's rates are assumed, {found.source}",
    )
