"""Bounds by which plans of several GPUs are ruled out without a trace."""

from collections import Counter
from dataclasses import replace

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.core.budget import Budget
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.recipe import Segment
from budgetfit.core.step_trace import StepTrace
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.live_bytes import LiveBytes
from budgetfit.memory.chain.peak import chain_peak_bytes, optimizer_step_bytes
from budgetfit.memory.replay import device_properties
from budgetfit.planning.search.holding_more import holding_more_can_gain
from budgetfit.planning.search.search import SearchResult
from budgetfit.planning.session import PlanningSession, Request, open_sessions
from budgetfit.workload.workload import Workload
from tests.models import MIB, Mebi
from tests.planning.profiling.test_depth_extrapolation import MIB_BATCH

WHOLE = Parallelism(engine="fsdp2", gpus=8, gpus_per_node=2)
COPIED = replace(WHOLE, shard=2)
BLOCKS = tuple(f"blocks.{number}" for number in range(6))


def workload() -> Workload:
    found = Workload(model=Mebi(6), batch=MIB_BATCH, gpu=find_gpu("t4"))
    return found.with_found_blocks()


def budget(usable_bytes: int = 2**34) -> Budget:
    return Budget(total_bytes=usable_bytes, context_bytes=0, headroom_bytes=0)


def sessions(*ways: Parallelism) -> list[PlanningSession]:
    """Sessions of two micro-batches per update."""
    found = open_sessions(
        *(workload(), Request(budget=budget())),
        precisions=["fp32"],
        optimizer="sgd",
        parallelisms=ways,
    )
    return [each.changed(accumulation=2) for each in found]


def test_pools_of_all_streams_are_reserved_whatever_is_recomputed() -> None:
    (session,) = sessions(WHOLE)
    chain = session.block_chain
    profiles = [
        each.profile_at(4, exact_blocks=False) for each in (chain, chain.streams_apart)
    ]
    for count in (0, 2, 6):
        segments = tuple(Segment((name,)) for name in BLOCKS[:count])
        judged = session.judge(session.settings.recipe(4, segments))
        live, least = (chain_peak_bytes(each, segments) for each in profiles)
        assert live <= judged.allocated_bytes
        assert live + MIB <= least <= judged.reserved_bytes
    trace = chain.all_kept(4)
    assert chain_peak_bytes(profiles[1], ()) == pools_bytes(trace)


def test_equal_shards_have_equal_options() -> None:
    # The micro-batch before left whole gradients: each backward leaves a shard of its
    # own. So less is live at each block, but what it adds is the same.
    (session,) = sessions(WHOLE)
    blocks = session.block_chain.profile_at(4).blocks
    middle = [each for each in blocks if each.name in BLOCKS[1:-1]]
    assert len({each.options for each in middle}) == 1
    assert {each.gradient_bytes for each in middle} == {MIB // 8 - MIB}


def pools_bytes(trace: StepTrace) -> int:
    """Add up the most that each stream holds in training steps of four samples."""
    device = device_properties(find_gpu("t4"))
    sizes = LiveBytes.of(trace, 4, device, exact_blocks=False).sizes
    streams = trace.side_streams()
    held, most = Counter[int](), Counter[int]()
    for number, event in enumerate(trace.events.tolist()):
        stream = streams.get(abs(event), 0)
        held[stream] += int(sizes[abs(event) - 1]) * (1 if event > 0 else -1)
        if number >= trace.phases[0].end:
            most[stream] = max(most[stream], held[stream])
    return most.total()


def test_there_are_no_such_pools_on_one_gpu_or_where_they_are_released() -> None:
    (one,) = sessions()
    assert one.block_chain.streams_apart is one.block_chain
    (several,) = sessions(WHOLE)
    released = AllocatorSettings(
        garbage_collection_threshold=0.5, per_process_memory_fraction=0.9
    )
    chain = several.changed(allocator=released).block_chain
    assert chain.streams_apart is chain
    apart = several.block_chain.streams_apart
    assert apart.streams_apart is apart is not several.block_chain


def test_copies_in_each_node_are_left_out_where_their_shards_do_not_fit() -> None:
    """Of 6 MiB of weights and as much of gradients each rank has 3, and not 0.75."""
    ways = [replace(each, sync_each_batch=True) for each in (WHOLE, COPIED)]
    whole, copied = sessions(*ways)
    none = SearchResult(session=whole, estimate=None)
    least = whole.block_chain.streams_apart.profile_at(1, exact_blocks=False)
    for room, may_gain in ((int(4.4 * MIB), False), (int(4.6 * MIB), True)):
        tight = budget(optimizer_step_bytes(least) + room)
        assert holding_more_can_gain(copied.asking(budget=tight), none) == may_gain


def test_an_optimizer_step_is_ruled_out_before_blocks_are_recomputed() -> None:
    _, copied = sessions(WHOLE, COPIED)
    tight = copied.asking(budget=budget(4 * MIB))
    assert not tight.optimizer_step_fits
    log = copied.traces.log
    assert log
    assert not any("6 blocks recomputed" in line for line in log)
