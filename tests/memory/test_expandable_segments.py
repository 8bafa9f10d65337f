"""Expandable segments: worked examples."""

import pytest

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.memory.reference_allocator.allocator import (
    OutOfMemory,
    ReferenceAllocator,
)
from tests.memory.test_reference_allocator import GIB, MIB, state_mib


def expandable(total_bytes: int = GIB) -> ReferenceAllocator:
    return ReferenceAllocator(total_bytes, AllocatorSettings(expandable_segments=True))


def test_expandable_segments_grow_in_pages_of_2_and_of_20_mib() -> None:
    allocator = expandable()
    allocator.malloc(MIB)
    assert state_mib(allocator) == (1, 2)
    allocator.malloc(41 * MIB)  # three pages
    assert state_mib(allocator) == (42, 62)
    allocator.malloc(19 * MIB)  # the rest of them
    assert state_mib(allocator) == (61, 62)


def test_expandable_segments_split_large_blocks_down_to_512_bytes() -> None:
    allocator = expandable()
    allocator.malloc(20 * MIB - 512)
    assert allocator.allocated_bytes == 20 * MIB - 512


def test_the_end_that_can_grow_is_kept_for_requests_that_need_it() -> None:
    allocator = expandable()
    hole, _, end = (allocator.malloc(size * MIB) for size in (20, 10, 10))
    allocator.free(hole)
    allocator.free(end)  # 10 MiB in front of unmapped addresses
    assert allocator.malloc(8 * MIB) is hole
    assert state_mib(allocator) == (18, 40)


def test_empty_cache_unmaps_whole_pages_between_blocks_in_use() -> None:
    allocator = expandable()
    _, middle, last = (allocator.malloc(size * MIB) for size in (5, 70, 5))
    allocator.free(middle)  # 5 to 75 of 80 MiB: the pages from 20 to 60 are free
    allocator.empty_cache()
    assert state_mib(allocator) == (10, 40)
    refilled = allocator.malloc(70 * MIB)  # 15 + two pages + 15
    assert state_mib(allocator) == (80, 80)
    for block in (refilled, last):
        allocator.free(block)
    allocator.malloc(75 * MIB)
    assert state_mib(allocator) == (80, 80)


def test_free_pages_are_given_back_before_the_device_is_called_full() -> None:
    allocator = expandable(100 * MIB)
    first, _ = allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)
    allocator.malloc(80 * MIB)  # above the block in use; the page below it must go
    assert state_mib(allocator) == (100, 100)
    assert allocator.retries == 1


def test_pages_mapped_before_the_device_was_found_full_count_in_the_peak() -> None:
    allocator = expandable(80 * MIB)
    first, second, third, _ = (allocator.malloc(20 * MIB) for _ in range(4))
    allocator.free(first)
    allocator.free(third)
    allocator.empty_cache()
    allocator.free(second)  # unmapped, free, unmapped, in use: 20 MiB each
    allocator.malloc(20 * MIB, stream=1)
    assert state_mib(allocator) == (40, 60)
    allocator.reset_peaks()
    with pytest.raises(OutOfMemory):
        allocator.malloc(60 * MIB)  # the first 20 MiB can be mapped, the last cannot
    assert state_mib(allocator) == (40, 40)
    assert allocator.peak_reserved_bytes == 80 * MIB


def test_a_range_without_pages_is_given_up_in_favour_of_a_later_one() -> None:
    allocator = expandable(160 * MIB)  # ranges of 180 MiB
    blocks = [allocator.malloc(20 * MIB) for _ in range(8)]
    middle = blocks.pop(4)
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    allocator.malloc(90 * MIB)  # 80 MiB on either side of the middle: a new range
    assert state_mib(allocator) == (110, 120)
    allocator.free(middle)
    allocator.empty_cache()
    allocator.malloc(30 * MIB)  # the 10 MiB left in the second range and a page
    assert state_mib(allocator) == (120, 120)
