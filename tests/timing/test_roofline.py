from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from budgetfit.core.step_trace import RATES, BlockPass, OpTable, Phase, StepTrace
from budgetfit.gpus.table import Gpu, all_gpus, find_gpu
from budgetfit.timing.kernel_times import (
    BANDWIDTH_SHARE,
    LAUNCH_NS,
    MATRIX_SHARE,
    StepTime,
    interval_ns,
    op_times_ns,
    step_time_ns,
)

Row = tuple[int, str, float, float, float, float]
H100 = find_gpu("h100-80gb")


def trace_of(
    rows: Sequence[Row],
    *,
    phases: Sequence[Phase] = (),
    passes: Sequence[BlockPass] = (),
    blocks: tuple[str, ...] = ("a", "b"),
) -> StepTrace:
    """Ops as (event, rate, fixed FLOPs, FLOPs per sample, fixed bytes, per sample)."""
    event, rate, *amounts = zip(*rows, strict=True)
    ints = np.zeros(0, np.int64)
    return StepTrace(
        batch_sizes=(2, 3),
        layers=(),
        block_names=("idle", *blocks),
        blocks=blocks,
        joined=tuple(False for _ in blocks),
        fixed_bytes=ints,
        bytes_per_sample=ints,
        category=ints.astype(np.int8),
        layer=ints.astype(np.int32),
        scratch_index=ints.astype(np.int32),
        scratch=(),
        events=ints.astype(np.int32),
        phases=tuple(phases),
        passes=tuple(passes),
        ops=OpTable(
            np.array(event, np.int64),
            np.full(len(event), -1, np.int32),
            np.array([RATES.index(name) for name in rate], np.int8),
            *(np.array(each, np.float64) for each in amounts),
            name=np.zeros(len(event), np.int32),
        ),
        op_names=("aten.mm.default",),
    )


def idle_ops(events: Iterable[int], **others: Any) -> StepTrace:
    """Ops without work, for tests that give their times themselves."""
    return trace_of([(event, "none", 0.0, 0.0, 0.0, 0.0) for event in events], **others)


def time_of(
    card: str, rate: str, *, flops: float = 0.0, moved: float = 0.0, tf32: bool = False
) -> float:
    trace = trace_of([(0, rate, flops, 0.0, moved, 0.0)])
    return float(op_times_ns(trace, 1, find_gpu(card), tf32=tf32)[0])


def test_a_matrix_product_takes_its_operations_at_the_cards_rate() -> None:
    # 10^12 operations; a TFLOP/s is 1000 of them per nanosecond.
    peak_ns = 1e12 / (find_gpu("rtx-4090").fp16_tflops * 1000)
    assert time_of("rtx-4090", "fp16", flops=1e12) == pytest.approx(
        peak_ns / MATRIX_SHARE
    )


def test_an_op_that_moves_much_takes_its_bytes_at_the_cards_bandwidth() -> None:
    # 10^9 bytes; a GB/s is one byte per nanosecond.
    peak_ns = 1e9 / find_gpu("rtx-4090").memory_gb_per_s
    assert time_of("rtx-4090", "none", moved=1e9) == pytest.approx(
        peak_ns / BANDWIDTH_SHARE
    )
    # More arithmetic does not add to it while it is the faster of the two.
    assert time_of("rtx-4090", "fp16", flops=1e9, moved=1e9) == time_of(
        "rtx-4090", "none", moved=1e9
    )


def test_nothing_is_faster_than_its_launch() -> None:
    assert time_of("h100-80gb", "fp16", flops=1.0, moved=1.0) == LAUNCH_NS


def test_work_grows_with_the_batch_from_a_fixed_part() -> None:
    trace = trace_of([(0, "fp16", 1e12, 2e12, 0.0, 0.0)])
    gpu = find_gpu("rtx-4090")
    at_1, at_3 = (op_times_ns(trace, size, gpu, tf32=False)[0] for size in (1, 3))
    assert at_3 / at_1 == pytest.approx(7 / 3)
    moving = trace_of([(0, "none", 0.0, 0.0, 1e9, 2e9)])
    at_1, at_3 = (op_times_ns(moving, size, gpu, tf32=False)[0] for size in (1, 3))
    assert at_3 / at_1 == pytest.approx(7 / 3)


def test_fp32_products_use_tensor_cores_only_with_tf32_switched_on() -> None:
    plain = time_of("h100-80gb", "fp32", flops=1e13)
    fast = time_of("h100-80gb", "fp32", flops=1e13, tf32=True)
    assert plain / fast == pytest.approx(H100.tf32_tflops / H100.fp32_tflops)
    # No tf32 before capability 8.0.
    assert time_of("t4", "fp32", flops=1e13, tf32=True) == time_of(
        "t4", "fp32", flops=1e13
    )


def test_bf16_before_capability_8_runs_at_the_fp32_rate() -> None:
    assert time_of("t4", "bf16", flops=1e13) == time_of("t4", "fp32", flops=1e13)
    assert time_of("t4", "fp16", flops=1e13) < time_of("t4", "bf16", flops=1e13) / 7
    assert time_of("h100-80gb", "bf16", flops=1e13) == time_of(
        "h100-80gb", "fp16", flops=1e13
    )


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_tensor_cores_follow_dtype_and_capability(gpu: Gpu) -> None:
    plain = time_of(gpu.name, "fp32", flops=1e15)
    faster = {
        "tf32": time_of(gpu.name, "fp32", flops=1e15, tf32=True) < plain,
        "fp16": time_of(gpu.name, "fp16", flops=1e15) < plain,
        "bf16": time_of(gpu.name, "bf16", flops=1e15) < plain,
    }
    # fp16 from Volta on (7.0), tf32 and bf16 from Ampere on (8.0): CUDA C++
    # Programming Guide, "Compute Capabilities". GeForce Ampere and Ada multiply tf32 no
    # faster than fp32.
    assert faster["fp16"] == (gpu.compute_capability >= (7, 0))
    assert faster["bf16"] == (gpu.compute_capability >= (8, 0))
    if gpu.compute_capability < (8, 0):
        assert not faster["tf32"]
        assert time_of(gpu.name, "bf16", flops=1e15) == plain


@pytest.mark.parametrize(
    ("card", "share"), [("h100-80gb", 2), ("rtx-4090", 64), ("t4", 32)]
)
def test_fp64_is_fast_only_on_data_center_cards(card: str, share: int) -> None:
    double, single = (time_of(card, rate, flops=1e15) for rate in ("fp64", "fp32"))
    assert double / single == pytest.approx(share)


def test_plain_arithmetic_runs_at_the_fp32_rate() -> None:
    assert time_of("t4", "none", flops=1e13) == time_of("t4", "fp32", flops=1e13)


# Each op takes its own power of two in launches, so that sums tell which were counted.
ONE_EACH = idle_ops((0, 1, 3, 3, 5, 8))
POWERS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])


@pytest.mark.parametrize(
    ("start", "end", "total"),
    [
        (0, 3, 2 + 4 + 8),  # its own outputs are counted: 3 events make event 3
        (3, 5, 16),
        (5, 8, 32),
        (0, 8, 62),
        (4, 4, 0),
        (8, 99, 0),
        (-1, 0, 1),  # before anything was allocated
    ],
)
def test_an_op_belongs_to_where_its_outputs_were_allocated(
    start: int, end: int, total: int
) -> None:
    assert interval_ns(ONE_EACH, POWERS, start, end) == total


def test_times_are_whole_nanoseconds() -> None:
    found = interval_ns(ONE_EACH, POWERS + 0.2, 0, 3)
    assert found == 15
    assert isinstance(found, int)


def test_a_step_is_its_last_micro_batch_and_the_optimizer() -> None:
    trace = idle_ops(
        range(1, 8),
        phases=[
            Phase("setup", -1, 0, 0, 1),
            Phase("forward", 0, 0, 1, 2),
            Phase("backward", 0, 0, 2, 3),
            Phase("forward", 0, 1, 3, 4),
            Phase("backward", 0, 1, 4, 5),
            Phase("optimizer", 0, 1, 5, 7),
        ],
    )
    times_ns = np.array([2.0**power for power in range(7)])
    found = step_time_ns(trace, times_ns)
    assert found == StepTime(forward_ns=8, backward_ns=16, optimizer_ns=32 + 64)
    assert found.total_ns() == 24 + 96
    assert found.total_ns(gradient_accumulation_steps=3) == 3 * 24 + 96


def test_a_faster_card_is_never_slower() -> None:
    rows = [(0, rate, 1e12, 0.0, 1e8, 0.0) for rate in ("fp32", "fp16", "bf16")]
    trace = trace_of(rows)
    slow, fast = (
        op_times_ns(trace, 1, find_gpu(card), tf32=True) for card in ("t4", "h100-80gb")
    )
    assert (fast < slow).all()
