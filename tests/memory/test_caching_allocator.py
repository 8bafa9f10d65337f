"""The quick allocator against the full one, event by event."""

from collections.abc import Mapping
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.memory.caching_allocator import NO_STREAMS, CachingAllocator
from budgetfit.memory.make_allocator import make_allocator, rounded_bytes
from budgetfit.memory.reference_allocator.allocator import (
    OutOfMemory,
    ReferenceAllocator,
    round_bytes,
)
from budgetfit.memory.reference_allocator.block_pool import Block
from budgetfit.memory.segment_addresses import SegmentAddresses

MIB = 1 << 20
GIB = 1 << 30

sizes = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 4 * MIB),
    st.integers(1, 40).map(lambda mib: mib * MIB),
    st.integers(1, 200 * MIB),
)
# A size allocates; a float frees that place among the live.
requests = st.lists(
    st.one_of(sizes, sizes, st.floats(0, 1, exclude_max=True)), max_size=80
)
totals = st.sampled_from([64 * MIB, 300 * MIB, GIB, 1 << 40])


def program(todo: list[int | float]) -> tuple[list[int], list[int]]:
    """Return events and sizes: storage k is allocated by k + 1, freed by -(k + 1)."""
    events: list[int] = []
    asked: list[int] = []
    live: list[int] = []
    for each in todo:
        if isinstance(each, float):
            if live:
                events.append(-live.pop(int(each * len(live))))
        else:
            asked.append(each)
            events.append(len(asked))
            live.append(len(asked))
    return events, asked


def played(
    total: int,
    events: list[int],
    asked: list[int],
    settings_text: str = "",
    streams: Mapping[int, int] = NO_STREAMS,
) -> list[tuple[int, ...]]:
    """Return what the full allocator says after each event, until it fails."""
    allocator = ReferenceAllocator(total, AllocatorSettings.parse(settings_text))
    blocks: dict[int, Block | None] = {}
    rows = []
    for event in events:
        try:
            if event > 0:
                block = blocks[event] = allocator.malloc(
                    asked[event - 1], streams.get(event, 0)
                )
                given_bytes = 0 if block is None else block.size_bytes
            else:
                block = blocks.pop(-event)
                given_bytes = 0 if block is None else -block.size_bytes
                allocator.free(block)
        except OutOfMemory:
            rows.append((event,))
            break
        state = allocator.allocated_bytes, allocator.reserved_bytes
        rows.append((given_bytes, *state, allocator.retries))
    return rows


@pytest.mark.parametrize(
    ("rise", "reserved_mib"),
    [
        (False, 180),  # the second segment is below the first: its block is taken
        (True, 300),  # the first segment stays in pieces, and 120 MiB need a third one
    ],
)
@pytest.mark.parametrize("text", ["", "max_split_size_mb:300"])
def test_of_two_free_blocks_of_equal_size_the_lower_is_taken(
    rise: bool, reserved_mib: int, text: str
) -> None:
    sizes = [each * MIB for each in (120, 60, 60, 60, 120)]
    with mock.patch.object(SegmentAddresses, "rise", new=rise):
        allocator = make_allocator(GIB, AllocatorSettings.parse(text), GIB)
        allocator.run([1, 2, -1, 3, -2, 4, -3, 5], sizes)
    assert allocator.reserved_bytes == reserved_mib * MIB


@settings(max_examples=400)
@example([11 * MIB - 512, MIB + 512], GIB, 0)  # a rest just above 1 MiB is split off
@given(requests, totals, st.integers(0, 2))
def test_both_allocators_agree_after_every_event(
    todo: list[int | float], total: int, side_streams: int
) -> None:
    events, asked = program(todo)
    # By turns on the default stream and on others.
    streams = {n: n % (side_streams + 1) for n in events if n % (side_streams + 1)}
    streams = {event: stream for event, stream in streams.items() if event > 0}
    quick = CachingAllocator(total, streams=streams)
    rounded = [round_bytes(each) for each in asked]
    for event, row in zip(
        events, played(total, events, asked, streams=streams), strict=False
    ):
        done = quick.run([event], rounded)
        if quick.failed_event is not None:
            assert row == (event,)
            assert done.deltas.size == 0
            break
        state = quick.allocated_bytes, quick.reserved_bytes
        assert (*done.deltas, *state, quick.retries) == row


@pytest.mark.parametrize("text", ["", "max_split_size_mb:200"])
def test_a_stream_never_takes_what_another_one_has_cached(text: str) -> None:
    chosen = AllocatorSettings.parse(text)
    sizes = [30 * MIB, 30 * MIB, 30 * MIB]
    events = [1, -1, 2, -2, 3]
    for streams, mib in (
        ({}, 30),
        ({2: 1}, 60),
        ({2: 1, 3: 1}, 60),
        ({2: 1, 3: 2}, 90),
    ):
        allocator = make_allocator(GIB, chosen, GIB, streams)
        allocator.run(events, sizes)
        assert allocator.reserved_bytes == mib * MIB
        again = allocator.copy()
        again.run([-3], sizes)
        assert again.reserved_bytes == mib * MIB


SIMULATED = [
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[2:4,8:0,>:2],large_segment_size_mb:16",
    "per_process_memory_fraction:0.7",
    "expandable_segments:True,roundup_power2_divisions:4",
    "max_split_size_mb:32",
    "garbage_collection_threshold:0.4,per_process_memory_fraction:0.9",
]


@pytest.mark.parametrize("text", SIMULATED)
@settings(max_examples=60, deadline=None)
@given(todo=requests, total=totals)
def test_the_simulated_allocator_does_what_the_reference_does(
    text: str, todo: list[int | float], total: int
) -> None:
    events, asked = program(todo)
    chosen = AllocatorSettings.parse(text)
    allocator = make_allocator(total, chosen, total)
    sizes = rounded_bytes(np.array(asked, np.int64), chosen).tolist()
    assert sizes == [round_bytes(n, chosen.roundup_power2_divisions) for n in asked]
    for event, row in zip(events, played(total, events, asked, text), strict=False):
        copy = allocator.copy()
        done, again = copy.run([event], sizes), allocator.run([event], sizes)
        assert (repr(done), copy.retries) == (repr(again), allocator.retries)
        if allocator.failed_event is not None:
            assert row == (event,)
            break
        assert (*done.deltas, allocator.retries) == (row[0], row[-1])


def test_most_settings_take_the_quick_allocator() -> None:
    for text, quick in {
        "": True,
        "roundup_power2_divisions:8,large_segment_size_mb:32": True,
        "garbage_collection_threshold:0.5": True,  # torch does not read it alone
        "per_process_memory_fraction:0.5": True,
        "expandable_segments:True": False,
        "max_split_size_mb:64": False,
    }.items():
        made = make_allocator(GIB, AllocatorSettings.parse(text), GIB)
        assert isinstance(made, CachingAllocator) is quick


@given(requests, requests, totals)
def test_all_events_at_once_are_as_one_by_one(
    first: list[int | float], second: list[int | float], total: int
) -> None:
    events, asked = program([*first, *second])
    rounded = [round_bytes(each) for each in asked]
    whole, single = CachingAllocator(total), CachingAllocator(total)
    done = whole.run(events, rounded)
    alone = []
    for event in events:
        alone.append(single.run([event], rounded))
        if single.failed_event is not None:
            break
    assert [*done.deltas] == [size for each in alone for size in each.deltas]
    assert whole.failed_event == single.failed_event
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        highest = max((getattr(each, name) for each in alone), default=0)
        assert getattr(done, name) == highest


@pytest.mark.parametrize("text", ["", *SIMULATED])
@settings(max_examples=60, deadline=None)
@given(requests, requests)
def test_a_copy_and_a_restored_state_go_on_as_the_original_does(
    text: str, first: list[int | float], second: list[int | float]
) -> None:
    events, asked = program([*first, *second])
    rounded = [round_bytes(each) for each in asked]
    cut = len(program(first)[0])
    quick = make_allocator(300 * MIB, AllocatorSettings.parse(text), 300 * MIB)
    quick.run(events[:cut], rounded)
    if quick.failed_event is not None:
        return
    before, copy = quick.state(), quick.copy()
    runs = [(repr(copy.run(events[cut:], rounded)), copy.state())]
    for _ in range(3):
        assert quick.state() == before
        runs.append((repr(quick.run(events[cut:], rounded)), quick.state()))
        quick.restore(before)
    assert runs == runs[:1] * 4


@pytest.mark.parametrize("text", ["", "max_split_size_mb:64"])
@pytest.mark.parametrize("wait", [[1, 2], [2, 1, 0], [1, 2, 3, -3], [2, 1, -1]])
def test_states_differ_where_a_block_does(wait: list[int], text: str) -> None:
    quick, other = (
        make_allocator(GIB, AllocatorSettings.parse(text), GIB) for _ in "ab"
    )
    sizes = [30 * MIB, 30 * MIB, 30 * MIB]
    quick.run([2, 1], sizes)
    other.run(wait, sizes)
    assert (quick.state() == other.state()) is (wait == [2, 1, 0])
