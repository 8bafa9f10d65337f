"""What the network adds to a step: worked examples of the two queues."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from budgetfit.core.parallelism import Parallelism
from budgetfit.core.step_trace import (
    SHARD_TO_DEVICE,
    SHARD_TO_HOST,
    OpTable,
    Phase,
    StepTrace,
)
from budgetfit.gpus.interconnect import find_link
from budgetfit.gpus.nccl_memory import nccl_memory
from budgetfit.gpus.table import find_gpu
from budgetfit.timing.collectives import (
    COPY_IN,
    COPY_OUT,
    GATHERS,
    REDUCES_ALL,
    SCATTERS,
    network_time,
)
from budgetfit.timing.kernel_times import host_bytes_per_ns, is_exchange

H100 = find_gpu("h100-80gb")
FSDP2 = Parallelism(engine="fsdp2", gpus=8)
DDP = Parallelism(engine="ddp", gpus=8)
ZERO = Parallelism(engine="deepspeed", gpus=8, zero_stage=2)
GATHER, MATMUL = GATHERS[0], "aten.mm.default"
PAYLOAD = 2**28  # bytes of each collective


def step(
    forward: list[tuple[str, float]], backward: list[tuple[str, float]]
) -> tuple[StepTrace, np.ndarray]:
    """A step of ops and their nanoseconds; an event after each."""
    rows = [*forward, *backward]
    names = tuple(dict.fromkeys(name for name, _ in rows))
    count = len(rows)
    zeros = np.zeros(count)
    ops = OpTable(
        event=np.arange(1, count + 1),
        layer=zeros.astype(np.int32),
        in_optimizer=zeros.astype(np.bool_),
        kind=zeros.astype(np.int8),
        kernels=zeros.astype(np.int16),
        blocks=zeros.astype(np.int16),
        efficiency=zeros + 1,
        rate=zeros.astype(np.int8),
        flops_fixed=zeros,
        flops_per_sample=zeros,
        bytes_fixed=np.array(
            [PAYLOAD if is_exchange(n) else 0 for n, _ in rows], float
        ),
        bytes_per_sample=zeros,
        name=np.array([names.index(name) for name, _ in rows], np.int32),
        recomputed=zeros.astype(np.bool_),
    )
    none = np.zeros(0, np.int32)
    cut = len(forward)
    trace = StepTrace(
        batch_sizes=(1,),
        layers=(),
        block_names=(),
        blocks=(),
        joined=(),
        fixed_bytes=none,
        bytes_per_sample=none,
        category=none,
        layer=none,
        scratch_index=none,
        scratch=(),
        events=np.zeros(count, np.int32),
        phases=(
            Phase("setup", -1, 0, 0, 0),
            Phase("forward", 0, 0, 0, cut),
            Phase("backward", 0, 0, cut, count),
        ),
        passes=(),
        ops=ops,
        op_names=names,
    )
    return trace, np.array([taken for _, taken in rows], float)


def once(name: str, parallelism: Parallelism = FSDP2) -> float:
    """Nanoseconds of one collective."""
    link = find_link(H100, across_nodes=False)
    reduces_all = name == REDUCES_ALL
    return link.time_ns(PAYLOAD, parallelism.gpus, reduces_all=reduces_all)


def waits(
    parallelism: Parallelism,
    forward: list[tuple[str, float]],
    backward: list[tuple[str, float]],
    accumulation: int = 1,
) -> float:
    trace, times = step(forward, backward)
    return network_time(trace, times, parallelism, H100, accumulation).expected_ns


def test_the_first_gather_is_waited_for_and_the_next_is_hidden() -> None:
    gather = once(GATHER)
    block = [(GATHER, 0.0), (COPY_OUT, 10.0), (MATMUL, 3 * gather)]
    assert waits(FSDP2, block * 2, []) == pytest.approx(gather, abs=50)


def test_where_kernels_are_short_the_network_decides() -> None:
    gather = once(GATHER)
    block = [(GATHER, 0.0), (COPY_OUT, 0.0), (MATMUL, gather / 4)]
    total = waits(FSDP2, block * 8, []) + 8 * gather / 4
    assert total == pytest.approx(8 * gather + gather / 4)


def test_a_reduction_waits_for_the_one_before_and_the_optimizer_for_all() -> None:
    scatter = once(SCATTERS)
    one = [(MATMUL, 100.0), (COPY_IN, 0.0), (SCATTERS, 0.0)]
    assert waits(FSDP2, [], one * 3) == pytest.approx(3 * scatter - 200)


def test_the_buckets_of_ddp_are_reduced_beside_the_backward() -> None:
    reduce = once(REDUCES_ALL, DDP)
    backward = [(MATMUL, 5 * reduce), (REDUCES_ALL, 0.0)] * 2
    assert waits(DDP, [], backward) == pytest.approx(reduce)  # the last one alone


def test_deepspeed_waits_for_each_collective_unless_it_overlaps() -> None:
    reduce = once(REDUCES_ALL, ZERO)
    backward = [(MATMUL, 5 * reduce), (REDUCES_ALL, 0.0)] * 2
    assert waits(ZERO, [], backward) == pytest.approx(2 * reduce)
    overlapped = replace(ZERO, overlap_comm=True)
    assert waits(overlapped, [], backward) == pytest.approx(reduce)


def test_zero_3_waits_for_the_gather_before_the_last() -> None:
    gather, zero3 = once(GATHER), replace(ZERO, zero_stage=3)
    module = [(GATHER, 0.0), (MATMUL, 3 * gather)]
    assert waits(zero3, module * 3, []) == 0
    short = [(GATHER, 0.0), (MATMUL, gather / 4)]
    assert waits(zero3, short * 8, []) == pytest.approx(7 * 3 * gather / 4, rel=0.2)


def test_where_the_host_is_slower_than_the_network_nothing_is_added() -> None:
    gather = once(GATHER)
    assert waits(FSDP2, [(GATHER, 2 * gather), (COPY_OUT, 10.0)], []) == 0


def test_what_repeats_with_micro_batches() -> None:
    """Gradients are reduced once; here the one traced micro-batch stands for all."""
    block = [(GATHER, 0.0), (COPY_OUT, 0.0), (MATMUL, 1.0)]
    each = waits(FSDP2, block, [])
    assert waits(FSDP2, block, [], accumulation=4) == pytest.approx(4 * each)


def copied() -> float:
    """Nanoseconds of one copy to or from the host."""
    return PAYLOAD / host_bytes_per_ns(H100)


def test_a_copy_from_the_host_comes_before_its_gather() -> None:
    gather, copy = once(GATHER), copied()
    block = [(SHARD_TO_DEVICE, 0.0), (GATHER, 0.0), (COPY_OUT, 0.0), (MATMUL, 1.0)]
    assert waits(FSDP2, block, []) == pytest.approx(copy + gather)
    # The second is copied while the first is gathered: the bus is the slower of both.
    assert copy > gather
    assert waits(FSDP2, block * 2, []) == pytest.approx(2 * copy + gather, abs=50)
    # Behind long kernels neither is seen.
    long = [*block[:-1], (MATMUL, 3 * copy)]
    assert waits(FSDP2, long * 2, []) == pytest.approx(copy + gather, abs=50)


def test_over_pcie_copies_and_collectives_share_the_bus() -> None:
    card = find_gpu("rtx-4090")
    block = [(SHARD_TO_DEVICE, 0.0), (GATHER, 0.0), (COPY_OUT, 0.0), (MATMUL, 1.0)]
    trace, times = step(block * 4, [])
    link = find_link(card, across_nodes=False)
    gather = link.time_ns(PAYLOAD, FSDP2.gpus, reduces_all=False)
    found = network_time(trace, times, FSDP2, card, 1).expected_ns
    copy = PAYLOAD / host_bytes_per_ns(card)
    assert found == pytest.approx(4 * (copy + gather), rel=1e-3)


def test_a_reduction_waits_for_what_is_copied_to_the_host_before() -> None:
    scatter, copy = once(SCATTERS), copied()
    one = [(MATMUL, 100.0), (COPY_IN, 0.0), (SCATTERS, 0.0), (SHARD_TO_HOST, 0.0)]
    expected = 3 * (scatter + copy) - 200
    assert waits(FSDP2, [], one * 3) == pytest.approx(expected)


def test_python_waits_for_a_copy_that_is_added_to_a_gradient() -> None:
    """In the second micro-batch of those that each reduce."""
    scatter, copy = once(SCATTERS), copied()
    long = 10 * (scatter + copy)
    one = [(COPY_IN, 0.0), (SCATTERS, 0.0), (SHARD_TO_HOST, 0.0), (MATMUL, long)]
    trace, times = step([], one * 2 * 2)  # two blocks, twice
    first, second = (
        Phase("backward", 0, micro, 8 * micro, 8 * (micro + 1)) for micro in (0, 1)
    )
    trace = replace(trace, phases=(first, second))
    each = replace(FSDP2, sync_each_batch=True)
    found = network_time(trace, times, each, H100, 2).expected_ns
    assert found == pytest.approx(2 * (scatter + copy))
    assert network_time(trace, times, FSDP2, H100, 2).expected_ns == 0


def test_more_ranks_and_slower_links_take_longer() -> None:
    card = find_gpu("rtx-4090")
    links = [
        find_link(H100, across_nodes=False),
        find_link(find_gpu("a100-80gb"), across_nodes=False),
        find_link(card, across_nodes=False),
    ]
    times = [each.time_ns(2**26, 8, reduces_all=True) for each in links]
    assert times == sorted(times)
    assert links[0].time_ns(2**26, 1, reduces_all=True) == 0
    # Larger payloads take longer, and small ones no less than the latency.
    for link in (*links, find_link(card, across_nodes=True)):
        series = [link.time_ns(2**n, 8, reduces_all=False) for n in range(10, 35)]
        assert series[0] > 0
        assert all(b >= 0.999 * a for a, b in pairwise(series))


def test_shards_that_nodes_reduce_at_the_same_time_share_their_adapters() -> None:
    def reduced(gpus: int, shard: int) -> float:
        """The wait for an all-reduce of each shard."""
        many = replace(FSDP2, gpus=gpus, gpus_per_node=8, shard=shard)
        return waits(many, [], [(REDUCES_ALL, 0.0)])

    nodes = find_link(H100, across_nodes=True)
    for shard, together in ((8, 8), (4, 4), (16, 8), (1, 1)):
        alone = nodes.time_ns(together * PAYLOAD, 32 // shard, reduces_all=True)
        assert reduced(32, shard) == pytest.approx(alone), shard
    within = find_link(H100, across_nodes=False)  # each GPU has links of its own
    alone = within.time_ns(PAYLOAD, 2, reduces_all=True)
    assert reduced(8, 4) == pytest.approx(alone)


def test_nccl_is_a_range_that_grows_with_its_communicators() -> None:
    two, many = nccl_memory(2, 1), nccl_memory(8, 1)
    assert two.low_bytes == 544 << 20
    assert many.low_bytes == 688 << 20
    for count in range(1, 6):
        memory = nccl_memory(8, count)
        assert memory.low_bytes <= memory.high_bytes
    assert replace(FSDP2, shard=4).communicators == 2
    assert replace(FSDP2, reshard_after_forward=4).communicators == 3
