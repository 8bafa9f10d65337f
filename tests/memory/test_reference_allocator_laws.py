"""Laws that the caching allocator keeps for any sequence of requests."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.memory.reference_allocator.allocator import (
    OutOfMemory,
    ReferenceAllocator,
    round_bytes,
)
from budgetfit.memory.reference_allocator.block_pool import Block

MIB = 1 << 20
TIB = 1 << 40

SETTINGS = [
    AllocatorSettings.parse(text)
    for text in (
        "",
        "expandable_segments:True",
        "max_split_size_mb:24",
        "expandable_segments:True,max_split_size_mb:24",
        "roundup_power2_divisions:4",
        "expandable_segments:True,roundup_power2_divisions:[1:8,2:0,>:2]",
        "large_segment_size_mb:32",
        "per_process_memory_fraction:0.5",
        "throw_on_cudamalloc_oom:True",
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9",
    )
]

# Sizes over all orders of magnitude, of which some are equal and some are whole MiB.
sizes = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 4 * MIB),
    st.integers(1, 40).map(lambda mib: mib * MIB),
    st.integers(1, 200 * MIB),
)
# (size, stream) allocates; a float frees that place among the live; None empties.
operations = st.lists(
    st.one_of(
        st.tuples(sizes, st.integers(0, 1)),
        st.floats(0, 1, exclude_max=True),
        st.tuples(sizes, st.integers(0, 1)),
        st.none(),
    ),
    min_size=20,
    max_size=60,
)
# So small that it is full in half of the examples.
DEVICE_BYTES = 40 * MIB


def run(allocator: ReferenceAllocator, todo: list[Any]) -> list[Block]:
    """Check the laws after each operation; return the blocks that are live."""
    live: list[Block] = []
    for operation in todo:
        peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        if operation is None:
            allocator.empty_cache()
        elif isinstance(operation, float):
            if live:
                allocator.free(live.pop(int(operation * len(live))))
        else:
            live.extend(allocate(allocator, *operation))
        assert allocator.allocated_bytes == sum(block.size_bytes for block in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= allocator.total_bytes
        assert allocator.peak_allocated_bytes == max(
            peaks[0], allocator.allocated_bytes
        )
        assert allocator.peak_reserved_bytes >= max(peaks[1], allocator.reserved_bytes)
    return live


def allocate(
    allocator: ReferenceAllocator, size_bytes: int, stream: int
) -> list[Block]:
    """The new block; none where the device is full, which must then be true."""
    options = allocator.settings
    needed_bytes = round_bytes(size_bytes, options.roundup_power2_divisions)
    try:
        block = allocator.malloc(size_bytes, stream)
    except OutOfMemory:
        allowed_bytes = options.allowed_bytes(allocator.total_bytes)
        # A page, or the rounding of a segment, may be missing, but no more.
        page_bytes = options.large_segment_bytes
        assert needed_bytes + page_bytes > allowed_bytes - allocator.reserved_bytes
        return []
    assert block is not None
    assert block.size_bytes >= needed_bytes >= size_bytes
    return [block]


@pytest.mark.parametrize("options", SETTINGS, ids=lambda each: each.text)
@settings(deadline=None)
@given(todo=operations)
def test_live_blocks_add_up_never_overlap_repeat_and_leave_nothing(
    options: AllocatorSettings, todo: list[Any]
) -> None:
    allocator, other = (ReferenceAllocator(DEVICE_BYTES, options) for _ in range(2))
    live, again = run(allocator, todo), run(other, todo)
    for pool in {block.pool for block in live}:
        spans = sorted(
            (block.address, block.address + block.size_bytes)
            for block in live
            if block.pool is pool
        )
        assert all(below_end <= start for (_, below_end), (start, _) in pairwise(spans))
    assert [each.size_bytes for each in live] == [each.size_bytes for each in again]
    assert allocator.reserved_bytes == other.reserved_bytes
    assert allocator.retries == other.retries
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("options", SETTINGS[:-1], ids=lambda each: each.text)
@settings(deadline=None)
@given(todo=operations)
def test_a_larger_device_changes_nothing_unless_the_smaller_was_full(
    options: AllocatorSettings, todo: list[Any]
) -> None:
    small, large = (
        ReferenceAllocator(total_bytes, options) for total_bytes in (DEVICE_BYTES, TIB)
    )
    run(small, todo)
    run(large, todo)
    if large.peak_reserved_bytes <= DEVICE_BYTES and small.retries == 0:
        assert small.peak_allocated_bytes == large.peak_allocated_bytes
        assert small.peak_reserved_bytes == large.peak_reserved_bytes
