"""The range in which a step's time is expected."""

import numpy as np
import pytest

from budgetfit.core.step_trace import OP_KINDS
from budgetfit.gpus.kernel_shares import find_shares
from budgetfit.gpus.table import find_gpu
from budgetfit.timing.step_time_range import (
    CONVOLUTIONAL,
    HOST_BOUND,
    OTHER,
    StepTimeRange,
    range_of,
)

RTX_3090 = find_gpu("rtx-3090")
A10 = find_gpu("a10")


def times(**kinds: float) -> np.ndarray:
    return np.array([kinds.get(kind, 0.0) for kind in OP_KINDS])


@pytest.mark.parametrize("found", [CONVOLUTIONAL, OTHER, HOST_BOUND])
def test_the_prediction_is_inside_its_range(found: StepTimeRange) -> None:
    assert 0 < found.low < 1 < found.high


def test_a_tenth_of_convolutions_makes_a_convolutional_network() -> None:
    some = times(matmul=88.0, convolution=5.0, depthwise_convolution=7.0)
    assert range_of(some, RTX_3090, host_bound=False) == CONVOLUTIONAL
    few = times(matmul=91.0, convolution=9.0)
    assert range_of(few, RTX_3090, host_bound=False) == OTHER


def test_the_hosts_pace_is_known_least() -> None:
    assert range_of(times(matmul=1.0), RTX_3090, host_bound=True) == HOST_BOUND
    for known in (CONVOLUTIONAL, OTHER):
        assert HOST_BOUND.low < known.low
        assert HOST_BOUND.high > known.high


def test_assumed_rates_widen_the_range_and_say_so() -> None:
    assert find_shares(A10).source.startswith("assumed")
    found = range_of(times(matmul=1.0), A10, host_bound=False)
    assert found.low == pytest.approx(OTHER.low / 1.15)
    assert found.high == pytest.approx(OTHER.high * 1.15)
    assert "rates are assumed" in found.note
    assert "rates are assumed" not in OTHER.note
