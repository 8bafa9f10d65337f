"""Between which times a step is expected, by how published steps missed predictions.

``benchmarks/step_times.py`` predicts each published step with constants fitted on other
models, and prints how many are inside these ranges.
"""

from collections.abc import Collection
from typing import Final, NamedTuple

import numpy as np

from budgetfit.core.step_trace import OP_KINDS, StepTrace
from budgetfit.gpus.kernel_shares import find_shares
from budgetfit.gpus.table import Gpu
from budgetfit.timing.kernel_times import (
    Nanoseconds,
    OpWork,
    host_bound_phases,
    kernel_times_ns,
    last_ops,
)

CONVOLUTIONS: Final = np.array(["convolution" in kind for kind in OP_KINDS])
MIN_CONVOLUTION_SHARE: Final = 0.1  # of a step's time


class StepTimeRange(NamedTuple):
    """Factors between the predicted and the shortest and longest expected time.

    Attributes:
        low, high: The factors, below and above 1.
        source: What they are from, for a note.
    """

    low: float
    high: float
    source: str

    @property
    def note(self) -> str:
        """Text for a plan's notes."""
        return (
            f"times are estimates: nine of ten {self.source} took "
            f"{self.low:.2f} to {self.high:.2f} times as long as predicted"
        )


# From the 5th to the 95th percentile of measured over predicted.
CONVOLUTIONAL: Final = StepTimeRange(
    0.85, 1.45, "published steps of convolutional networks"
)
OTHER: Final = StepTimeRange(0.85, 1.30, "published steps of such networks")
# Few rows; hosts took 12 to 38 microseconds a kernel, where 18 are predicted.
HOST_BOUND: Final = StepTimeRange(
    0.70, 1.80, "published steps that wait for Python to launch kernels"
)
ASSUMED_RATES: Final = 1.15  # wider by so much for GPUs whose shares are assumed


def step_time_range(
    trace: StepTrace,
    batch_size: int,
    gpu: Gpu,
    *,
    tf32: bool,
    selective_blocks: Collection[str] = (),
) -> StepTimeRange:
    """Return the range for a step; the arguments are those of ``op_times_ns``."""
    kernels_ns = kernel_times_ns(OpWork.of(trace, batch_size), gpu, tf32=tf32)
    ops = np.concatenate(list(last_ops(trace).values()))
    by_kind: Nanoseconds = np.zeros(len(OP_KINDS))
    np.add.at(by_kind, trace.ops.kind[ops], kernels_ns[ops])
    waiting = host_bound_phases(trace, kernels_ns, selective_blocks)
    return range_of(by_kind, gpu, host_bound=waiting > 0)


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
        f"{found.source} (and 15 % more, since this GPU's rates are assumed)",
    )
