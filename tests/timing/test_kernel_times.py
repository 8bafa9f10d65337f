from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from budgetfit.core.step_trace import (
    FUSED_KERNEL,
    OP_KINDS,
    RATES,
    BlockPass,
    Direction,
    OpTable,
    Phase,
    StepTrace,
)
from budgetfit.gpus.kernel_shares import find_shares
from budgetfit.gpus.table import Gpu, all_gpus, find_gpu
from budgetfit.timing.kernel_times import (
    CHECKPOINT_NS,
    COMPILED_NS,
    COPY_NS,
    CPU_BYTES_PER_NS,
    ELEMENTS_PER_SM,
    ISSUE_NS,
    KERNEL_NS,
    PRODUCT_NS,
    RECOMPUTED_NS,
    SELECTIVE_NS,
    VECTOR_BLOCK,
    OpWork,
    StepTime,
    interval_ns,
    kernel_times_ns,
    op_times,
    phases_waiting,
    step_time_ns,
)
from budgetfit.timing.kind_shares import KIND_SHARES
from budgetfit.timing.step_time_range import (
    CONVOLUTIONAL,
    HOST_BOUND,
    OTHER,
    step_time_range,
)

Row = tuple[int, str, float, float, float, float]
H100 = find_gpu("h100-80gb")
A100 = find_gpu("a100-80gb")


def trace_of(
    rows: Sequence[Row],
    *,
    phases: Sequence[Phase] = (),
    passes: Sequence[BlockPass] = (),
    blocks: tuple[str, ...] = ("a", "b"),
    kind: str = "matmul",
    kernels: int = 1,
    in_optimizer: Sequence[int] = (),
    recomputed: Sequence[int] = (),
    efficiency: float = 1.0,
    thread_blocks: int = 0,
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
            np.isin(np.arange(len(event)), in_optimizer),
            np.full(len(event), OP_KINDS.index(kind), np.int8),
            np.full(len(event), kernels, np.int16),
            np.full(len(event), efficiency),
            np.full(len(event), thread_blocks, np.int16),
            np.array([RATES.index(name) for name in rate], np.int8),
            *(np.array(each, np.float64) for each in amounts),
            name=np.zeros(len(event), np.int32),
            recomputed=np.isin(np.arange(len(event)), recomputed),
        ),
        op_names=("aten.mm.default",),
    )


def idle_ops(events: Iterable[int], **others: Any) -> StepTrace:
    """Ops without work, for tests that give their times themselves."""
    return trace_of([(event, "none", 0.0, 0.0, 0.0, 0.0) for event in events], **others)


def time_of(
    card: str,
    rate: str,
    *,
    flops: float = 0.0,
    moved: float = 0.0,
    tf32: bool = False,
    **others: Any,
) -> float:
    trace = trace_of([(0, rate, flops, 0.0, moved, 0.0)], **others)
    return float(op_times(trace, 1, find_gpu(card), tf32=tf32).times_ns[0])


ADA = find_gpu("rtx-4090")


def test_a_kernel_takes_its_launch_its_arithmetic_and_its_bytes() -> None:
    # 10^12 operations; a TFLOP/s is 1000 of them per nanosecond. 10^9 bytes; a GB/s is
    # one byte per nanosecond.
    shares, kind = find_shares(ADA), KIND_SHARES["matmul"]
    arithmetic_ns = 1e12 / (ADA.fp16_tflops * 1000 * shares.tensor_16bit * kind.rate)
    memory_ns = 1e9 / (ADA.memory_gb_per_s * shares.bandwidth * kind.bandwidth)
    assert time_of("rtx-4090", "fp16", flops=1e12, moved=1e9) == pytest.approx(
        PRODUCT_NS + arithmetic_ns + memory_ns
    )


def test_a_memory_bound_op_takes_its_bytes_whatever_it_computes() -> None:
    shares, kind = find_shares(ADA), KIND_SHARES["softmax"]
    memory_ns = 1e9 / (ADA.memory_gb_per_s * shares.bandwidth * kind.bandwidth)
    for flops in (0.0, 1e12):
        assert time_of(
            "rtx-4090", "fp16", flops=flops, moved=1e9, kind="softmax"
        ) == pytest.approx(KERNEL_NS + memory_ns)


def test_each_kernel_of_an_op_is_launched() -> None:
    one, three = (
        time_of("rtx-4090", "fp16", moved=1e9, kernels=count) for count in (1, 3)
    )
    assert three - one == pytest.approx(2 * PRODUCT_NS)


def test_a_shape_below_the_rate_of_its_kind_takes_longer() -> None:
    half, whole = (
        time_of("rtx-4090", "fp16", flops=1e15, efficiency=share) for share in (0.5, 1)
    )
    assert half / whole == pytest.approx(2, rel=1e-2)


@pytest.mark.parametrize(("thread_blocks", "longer"), [(0, 1), (32, 4), (128, 1)])
def test_idle_multiprocessors_move_no_bytes(thread_blocks: int, longer: float) -> None:
    assert ADA.sm_count == 128
    one, other = (
        time_of("rtx-4090", "none", moved=1e12, kind="batch_norm", thread_blocks=count)
        for count in (0, thread_blocks)
    )
    assert other / one == pytest.approx(longer, rel=1e-3)


def test_each_thread_block_of_pytorchs_batch_norm_moves_as_much() -> None:
    def time(card: str, thread_blocks: int) -> float:
        return time_of(
            card,
            "none",
            moved=1e12,
            kind="plain_batch_norm",
            thread_blocks=thread_blocks,
        )

    assert time("rtx-4090", 32) / time("rtx-4090", 64) == pytest.approx(2, rel=1e-3)
    assert time("rtx-4090", 64) == pytest.approx(time("h100-80gb", 64), rel=1e-3)
    assert time("rtx-4090", 4096) == time("rtx-4090", 0)  # enough of them


@pytest.mark.parametrize(
    ("card", "thread_blocks", "moving"),
    [("h100-80gb", 64, 64), ("h100-80gb", 1024, 132), ("a100-80gb", 1024, None)],
)
def test_each_multiprocessor_runs_one_thread_block_of_cudnns_batch_norm(
    card: str, thread_blocks: int, moving: int | None
) -> None:
    gpu = find_gpu(card)
    few, free = (
        time_of(card, "none", moved=1e12, kind="batch_norm", thread_blocks=count)
        for count in (thread_blocks, 0)
    )
    if moving is None:  # its bandwidth is less than all multiprocessors' blocks ask for
        assert few == pytest.approx(free)
    else:
        assert moving <= gpu.sm_count
        assert few == pytest.approx(1e12 / (moving * VECTOR_BLOCK), rel=1e-3)
        assert few > free


def test_elements_one_by_one_take_as_long_whatever_their_bytes() -> None:
    def time(card: str, moved: float) -> float:
        return time_of(card, "elements", flops=1e12, moved=moved, kind="copy")

    gpu = find_gpu("h100-80gb")
    elements_ns = 1e12 / (ELEMENTS_PER_SM * gpu.sm_count)
    assert time("h100-80gb", 4e12) == pytest.approx(elements_ns, rel=1e-3)
    assert time("h100-80gb", 1e12) == time("h100-80gb", 4e12)
    bytes_ns = time_of("h100-80gb", "none", moved=1e14, kind="copy")
    assert time("h100-80gb", 1e14) == bytes_ns


def test_flash_attention_2_is_slower_than_cudnn_on_hopper_alone() -> None:
    for card, ratio in (("h100-80gb", 1 / 0.54), ("rtx-4090", 1.0)):
        flash, cudnn = (
            time_of(card, "bf16", flops=1e15, kind=f"{name}_attention")
            for name in ("flash", "cudnn")
        )
        assert flash / cudnn == pytest.approx(ratio, rel=1e-3)


def test_work_grows_with_the_batch_from_a_fixed_part() -> None:
    trace = trace_of([(0, "fp16", 1e12, 2e12, 0.0, 0.0)])
    gpu = find_gpu("rtx-4090")
    at_1, at_3 = (op_times(trace, size, gpu, tf32=False).times_ns[0] for size in (1, 3))
    assert at_3 / at_1 == pytest.approx(7 / 3, rel=1e-2)
    moving = trace_of([(0, "none", 0.0, 0.0, 1e9, 2e9)])
    at_1, at_3 = (
        op_times(moving, size, gpu, tf32=False).times_ns[0] for size in (1, 3)
    )
    assert at_3 / at_1 == pytest.approx(7 / 3, rel=1e-2)


def test_fp32_products_use_tensor_cores_only_with_tf32_switched_on() -> None:
    plain = time_of("h100-80gb", "fp32", flops=1e13)
    fast = time_of("h100-80gb", "fp32", flops=1e13, tf32=True)
    shares = find_shares(H100)
    assert plain / fast == pytest.approx(
        H100.tf32_tflops * shares.tf32 / (H100.fp32_tflops * shares.fp32), rel=1e-3
    )
    # No tf32 before capability 8.0.
    assert time_of("t4", "fp32", flops=1e13, tf32=True) == time_of(
        "t4", "fp32", flops=1e13
    )


def test_fp32_convolutions_are_in_tf32_by_default_and_attention_never_is() -> None:
    product, convolution, attention = (
        [
            time_of("h100-80gb", "fp32", flops=1e13, tf32=tf32, kind=kind)
            for tf32 in (False, True)
        ]
        for kind in ("matmul", "convolution", "efficient_attention")
    )
    assert product[0] > 5 * product[1]
    assert convolution[0] == convolution[1] < product[1]
    assert attention[0] == attention[1] > product[0]


def test_products_of_h100s_that_train_together_are_slower() -> None:
    alone, together = (
        kernel_times_ns(
            OpWork.of(trace_of([(0, "bf16", 1e13, 0.0, 0.0, 0.0)]), 1),
            H100,
            tf32=False,
            together=together,
        )[0]
        for together in (False, True)
    )
    shares = find_shares(H100)
    assert together / alone == pytest.approx(
        shares.tensor_16bit / shares.together, rel=1e-3
    )
    assert find_shares(ADA, together=True) == find_shares(ADA)


def test_bf16_before_capability_8_runs_at_the_fp32_rate() -> None:
    assert time_of("t4", "bf16", flops=1e13) == time_of("t4", "fp32", flops=1e13)
    assert time_of("t4", "fp16", flops=1e13) < time_of("t4", "bf16", flops=1e13) / 5
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
    assert double / single == pytest.approx(share, rel=1e-3)


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
        in_optimizer=[5, 6],
    )
    times_ns = np.array([2.0**power for power in range(7)])
    found = step_time_ns(trace, times_ns)
    assert found == StepTime(forward_ns=8, backward_ns=16, optimizer_ns=32 + 64)
    assert found.total_ns() == 24 + 96
    assert found.total_ns(gradient_accumulation_steps=3) == 3 * 24 + 96


def test_an_optimizer_that_allocates_nothing_runs_once_a_step() -> None:
    # Its only op ends where the backward's last one does, by events alone.
    trace = idle_ops(
        (1, 2, 3, 3),
        phases=[
            Phase("forward", 0, 0, 0, 2),
            Phase("backward", 0, 0, 2, 3),
            Phase("optimizer", 0, 0, 3, 3),
        ],
        in_optimizer=[3],
    )
    found = step_time_ns(trace, np.array([1.0, 2.0, 4.0, 8.0]))
    assert found == StepTime(forward_ns=3, backward_ns=4, optimizer_ns=8)
    assert interval_ns(trace, np.array([1.0, 2.0, 4.0, 8.0]), 2, 3) == 4


STEP = [
    Phase("forward", 0, 0, 0, 2),
    Phase("backward", 0, 0, 2, 4),
    Phase("optimizer", 0, 0, 4, 5),
]


def test_a_phase_of_small_kernels_takes_what_the_host_needs_to_issue_them() -> None:
    trace = idle_ops(range(1, 6), phases=STEP, in_optimizer=[4])
    found = step_time_ns(trace, op_times(trace, 1, ADA, tf32=False).times_ns)
    assert found == StepTime(
        round(2 * ISSUE_NS["forward"]),
        round(2 * ISSUE_NS["backward"]),
        round(ISSUE_NS["optimizer"]),
    )


CHECKPOINTED = [
    BlockPass(1, "forward", 0, 0, 0, 2, -1, -1),
    BlockPass(1, "backward", 0, 0, 2, 5, -1, -1),
]
LONGER_BACKWARD = [
    Phase("forward", 0, 0, 0, 2),
    Phase("backward", 0, 0, 2, 5),
    Phase("optimizer", 0, 0, 5, 6),
]


def checkpointed_ops(recomputed: Sequence[int]) -> StepTrace:
    return idle_ops(
        range(1, 7),
        phases=LONGER_BACKWARD,
        passes=CHECKPOINTED,
        in_optimizer=[5],
        recomputed=recomputed,
    )


@pytest.mark.parametrize(
    ("selective_blocks", "more_ns"), [((), 0.0), (("a",), 2 * SELECTIVE_NS)]
)
def test_a_recomputed_block_runs_python_and_its_hooks_in_both_passes(
    selective_blocks: tuple[str, ...], more_ns: float
) -> None:
    trace = checkpointed_ops([2, 3])
    times = op_times(trace, 1, ADA, tf32=False, selective_blocks=selective_blocks)
    hooks_ns = CHECKPOINT_NS + 2 * RECOMPUTED_NS + more_ns
    again_ns = 2 * ISSUE_NS["forward"] + hooks_ns
    assert step_time_ns(trace, times.times_ns) == StepTime(
        round(again_ns),
        round(again_ns + ISSUE_NS["backward"]),
        round(ISSUE_NS["optimizer"]),
    )
    assert interval_ns(trace, times.times_ns, 2, 4) == round(again_ns)


@pytest.mark.parametrize(("again", "calls"), [((), ()), ([2, 3], ("forward",))])
def test_python_calls_compiled_code_of_a_block_beside_its_kernels(
    again: Sequence[int], calls: Sequence[Direction]
) -> None:
    trace = checkpointed_ops(again)
    compiled = replace(trace, op_names=(FUSED_KERNEL,))
    (forward, backward, _), (called, back, _) = (
        step_time_ns(each, op_times(each, 1, ADA, tf32=False).times_ns)
        for each in (trace, compiled)
    )
    assert called - forward == COMPILED_NS["forward"]
    in_backward = ("backward", *calls)
    assert back - backward == sum(COMPILED_NS[name] for name in in_backward)


def test_python_needs_longer_for_a_copy_to_the_host_than_for_a_kernel() -> None:
    trace = idle_ops(
        range(1, 7), phases=LONGER_BACKWARD, passes=CHECKPOINTED, in_optimizer=[5]
    )
    kind = trace.ops.kind.copy()
    kind[[1, 2]] = OP_KINDS.index("host")  # of no bytes
    trace = replace(trace, ops=replace(trace.ops, kind=kind))
    times_ns = op_times(trace, 1, ADA, tf32=False).times_ns
    forward, backward, _ = step_time_ns(trace, times_ns)
    launch_ns = times_ns[1]  # of the copy itself
    assert forward == round(ISSUE_NS["forward"] + COPY_NS["forward"] + launch_ns)
    assert backward == round(2 * ISSUE_NS["backward"] + COPY_NS["backward"] + launch_ns)


def test_servers_of_a_t4_need_longer_to_issue_kernels() -> None:
    trace = idle_ops(range(1, 6), phases=STEP, in_optimizer=[4])
    workstation, server = (
        step_time_ns(trace, op_times(trace, 1, gpu, tf32=False).times_ns)
        for gpu in (ADA, find_gpu("t4"))
    )
    assert (
        server.total_ns() == find_shares(find_gpu("t4")).host * workstation.total_ns()
    )


def test_the_host_runs_ahead_of_long_kernels() -> None:
    trace = trace_of(
        [(event, "fp16", 1e13, 0.0, 0.0, 0.0) for event in range(1, 6)],
        phases=STEP,
        in_optimizer=[4],
    )
    times_ns = op_times(trace, 1, H100, tf32=False).times_ns
    assert (times_ns > 1e6).all()
    assert len(set(times_ns.tolist())) == 1


@pytest.mark.parametrize("waiting", [None, 0, 3])
def test_an_optimizer_on_the_cpu_takes_its_bytes_whoever_waits(
    waiting: int | None,
) -> None:
    trace = trace_of(
        [(event, "none", 0.0, 0.0, 1e9, 0.0) for event in range(1, 6)],
        phases=STEP,
        in_optimizer=[4],
        kind="cpu",
        kernels=0,
    )
    times_ns = op_times(trace, 1, H100, tf32=False, waiting=waiting).times_ns
    assert times_ns == pytest.approx(1e9 / CPU_BYTES_PER_NS)


def test_each_doubling_of_the_nodes_makes_kernels_longer() -> None:
    rows: list[Row] = [(event, "fp16", 1e13, 0.0, 0.0, 0.0) for event in range(1, 6)]
    trace = trace_of(rows, phases=STEP, in_optimizer=[4])
    one, two, four = (
        op_times(trace, 1, H100, tf32=False, nodes=nodes).times_ns.sum()
        for nodes in (1, 2, 4)
    )
    assert one < two < four
    assert four - two == pytest.approx(two - one)


def test_the_range_of_a_step_follows_from_its_ops() -> None:
    idle = idle_ops(range(1, 6), phases=STEP, in_optimizer=[4])
    rows: list[Row] = [(event, "fp16", 1e13, 0.0, 0.0, 0.0) for event in range(1, 6)]
    for trace, expected in (
        (idle, HOST_BOUND),
        (trace_of(rows, phases=STEP, in_optimizer=[4]), OTHER),
        (trace_of(rows, phases=STEP, kind="grouped_convolution"), CONVOLUTIONAL),
    ):
        times = op_times(trace, 1, A100, tf32=False)
        assert step_time_range(trace, times, A100) == expected


@pytest.mark.parametrize(
    ("kernels_ns", "issue_ns", "micro_steps", "waiting"),
    [
        ([1, 1, 1], [2, 2, 2], 1, 3),  # the GPU always waits
        ([3, 3, 3], [2, 2, 2], 1, 0),  # never
        ([1, 9, 1], [2, 2, 2], 1, 1),  # for the forward pass only
        ([9, 1, 1], [2, 2, 2], 1, 0),  # the host is ahead by the forward's kernels
        ([3, 1, 1], [2, 4, 1], 1, 2),
        ([2, 2, 1], [1, 1, 9], 1, 3),  # for an optimizer of many kernels
        ([2, 2, 1], [1, 1, 9], 8, 0),  # but not where it is a small part of the step
    ],
)
def test_the_longest_way_through_host_and_gpu_is_the_step(
    kernels_ns: list[float], issue_ns: list[float], micro_steps: int, waiting: int
) -> None:
    assert phases_waiting(kernels_ns, issue_ns, micro_steps) == waiting


def test_a_faster_card_is_never_slower() -> None:
    rows = [(0, rate, 1e12, 0.0, 1e8, 0.0) for rate in ("fp32", "fp16", "bf16")]
    trace = trace_of(rows)
    slow, fast = (
        op_times(trace, 1, find_gpu(card), tf32=True).times_ns
        for card in ("t4", "h100-80gb")
    )
    assert (fast < slow).all()
