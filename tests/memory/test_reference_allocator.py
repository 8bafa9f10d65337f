"""The caching allocator: worked examples."""

import pytest

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.memory.reference_allocator.allocator import (
    OutOfMemory,
    ReferenceAllocator,
    round_bytes,
)

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def allocator() -> ReferenceAllocator:
    return ReferenceAllocator(GIB)


def state_mib(allocator: ReferenceAllocator) -> tuple[float, float]:
    """Allocated and reserved MiB."""
    return allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


# ---- Worked examples: rounding and segments (M6)


def test_requests_are_rounded_up_to_512_bytes() -> None:
    sizes_bytes = [0, 1, 511, 512, 513, 1024, MIB - 1]
    assert [round_bytes(size) for size in sizes_bytes] == [
        0, 512, 512, 512, 1024, 1024, MIB,
    ]  # fmt: skip


def test_zero_bytes_take_nothing_and_can_be_freed(
    allocator: ReferenceAllocator,
) -> None:
    block = allocator.malloc(0)
    assert block is None
    allocator.free(block)
    assert state_mib(allocator) == (0, 0)


def test_a_small_request_takes_a_2_mib_segment_that_the_next_ones_share(
    allocator: ReferenceAllocator,
) -> None:
    allocator.malloc(1)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (512, 2 * MIB)
    allocator.malloc(MIB)  # the last size of the small pool: 1 MiB + 512 of 2 MiB
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (MIB + 512, 2 * MIB)
    allocator.malloc(MIB)  # only 1 MiB - 512 is left: a second segment
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (
        2 * MIB + 512,
        4 * MIB,
    )


def test_requests_between_1_and_10_mib_share_20_mib_segments(
    allocator: ReferenceAllocator,
) -> None:
    allocator.malloc(MIB + 1)  # the first size of the large pool
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (
        MIB + 512,
        20 * MIB,
    )
    allocator.malloc(10 * MIB - 512)  # the last that shares: 11 of 20 MiB
    assert state_mib(allocator) == (11, 20)
    allocator.malloc(9 * MIB)  # the rest, exactly
    assert state_mib(allocator) == (20, 20)
    allocator.malloc(2 * MIB)
    assert state_mib(allocator) == (22, 40)


@pytest.mark.parametrize(
    ("request_bytes", "segment_mib"),
    [(10 * MIB, 10), (10 * MIB + 1, 12), (12 * MIB, 12), (101 * MIB, 102)],
)
def test_a_request_from_10_mib_on_gets_a_segment_rounded_up_to_2_mib(
    allocator: ReferenceAllocator, request_bytes: int, segment_mib: int
) -> None:
    allocator.malloc(request_bytes)
    assert allocator.reserved_bytes == segment_mib * MIB


# ---- Worked examples: splitting and joining (M9)


def test_a_rest_of_1_mib_is_not_split_off_and_counts_as_allocated(
    allocator: ReferenceAllocator,
) -> None:
    block = allocator.malloc(11 * MIB)  # segment of 12 MiB, rest of 1 MiB
    assert state_mib(allocator) == (12, 12)
    assert block is not None
    assert block.size_bytes == 12 * MIB
    allocator.free(block)
    assert state_mib(allocator) == (0, 12)


def test_a_rest_just_above_1_mib_is_split_off_and_serves_the_next_request(
    allocator: ReferenceAllocator,
) -> None:
    allocator.malloc(11 * MIB - 512)  # rest of 1 MiB + 512
    assert allocator.allocated_bytes == 11 * MIB - 512
    allocator.malloc(MIB + 512)
    assert state_mib(allocator) == (12, 12)


def test_the_small_pool_splits_off_even_512_bytes(
    allocator: ReferenceAllocator,
) -> None:
    for _ in range(3):
        allocator.malloc(MIB - 512)  # twice, and 1024 bytes are left; then anew
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (
        3 * MIB - 1536,
        4 * MIB,
    )
    allocator.malloc(1024)  # exactly the rest of the first segment
    allocator.malloc(512)
    assert allocator.reserved_bytes == 4 * MIB


SPLIT = "max_split_size_mb:128"
EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("settings", "total_mib", "cached", "asked", "state"),
    [
        # Best fit has no upper bound: cut off the 5 GiB, no segment of its own.
        ("", 8192, [5120], 12, (12, 5120)),
        # The smallest that is large enough; its rest of 1 MiB stays.
        ("", 1024, [100, 40, 60], 59, (60, 200)),
        # Neighbouring segments are never joined.
        ("", 1024, [20, 20], 40, (40, 80)),
        # An oversized block is not broken up for a request below the limit.
        (SPLIT, 1024, [128], 100, (100, 228)),
        # A request of the limit takes a block less than 20 MiB larger whole,
        (SPLIT, 1024, [146], 128, (146, 146)),
        (SPLIT, 1024, [148], 128, (128, 276)),
        # or as much larger as is set.
        (f"{SPLIT},max_non_split_rounding_mb:64", 1024, [190], 128, (190, 190)),
        # A full device first gets back one oversized block without a retry: the 250
        # suffice; the 20 and the 300 stay cached.
        (SPLIT, 700, [20, 250, 300], 200, (200, 520)),
        # Or several, largest first: 150 + 140.
        (SPLIT, 700, [20, 130, 140, 150], 290, (290, 440)),
        # An expandable segment maps only what its free end lacks.
        (EXPANDABLE, 1024, [40], 50, (50, 60)),
        # Its blocks join across what would be segments.
        (EXPANDABLE, 1024, [20, 20, 20], 60, (60, 60)),
    ],
)
def test_what_a_request_takes_of_the_blocks_that_are_cached(
    settings: str, total_mib: int, cached: list[int], asked: int, state: tuple[int, int]
) -> None:
    allocator = ReferenceAllocator(total_mib * MIB, AllocatorSettings.parse(settings))
    for block in [allocator.malloc(size * MIB) for size in cached]:
        allocator.free(block)
    allocator.malloc(asked * MIB)
    assert state_mib(allocator) == state
    assert allocator.retries == 0


def test_between_equal_sizes_the_lowest_address_is_taken(
    allocator: ReferenceAllocator,
) -> None:
    lower, higher = allocator.malloc(40 * MIB), allocator.malloc(40 * MIB)
    allocator.free(higher)
    allocator.free(lower)
    assert allocator.malloc(40 * MIB) is lower


def test_a_freed_block_joins_free_neighbours_on_both_sides(
    allocator: ReferenceAllocator,
) -> None:
    whole = [allocator.malloc(5 * MIB) for _ in range(4)]  # one segment of 20 MiB
    allocator.free(whole[0])
    allocator.free(whole[2])
    allocator.free(whole[1])  # 5 + 5 + 5 MiB
    allocator.malloc(15 * MIB)
    assert state_mib(allocator) == (20, 20)


def test_a_stream_does_not_use_the_blocks_of_another(
    allocator: ReferenceAllocator,
) -> None:
    allocator.free(allocator.malloc(40 * MIB, stream=1))
    allocator.malloc(40 * MIB)
    assert state_mib(allocator) == (40, 80)
    allocator.malloc(40 * MIB, stream=1)
    assert state_mib(allocator) == (80, 80)


# ---- Worked examples: a full device


def test_a_full_device_gets_the_cached_segments_back_and_the_request_succeeds() -> None:
    allocator = ReferenceAllocator(100 * MIB)
    allocator.malloc(30 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.free(allocator.malloc(24 * MIB, stream=1))  # 84 MiB reserved
    allocator.malloc(60 * MIB)  # 30 + 60 fits only without both cached segments
    assert state_mib(allocator) == (90, 90)
    assert allocator.retries == 1


def test_a_retry_keeps_segments_that_are_partly_in_use() -> None:
    allocator = ReferenceAllocator(100 * MIB)
    allocator.malloc(2 * MIB)  # 2 of 20 MiB
    allocator.malloc(80 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(20 * MIB)  # 18 are free, in the segment that stays
    assert state_mib(allocator) == (82, 100)
    assert allocator.retries == 1


def test_out_of_memory_says_what_was_asked_for_and_what_there_was() -> None:
    allocator = ReferenceAllocator(100 * MIB)
    allocator.malloc(64 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    with pytest.raises(
        OutOfMemory,
        match="41943039 bytes requested with 67108864 allocated and 67108864 reserved "
        "on a device of 104857600",
    ) as caught:
        allocator.malloc(40 * MIB - 1)
    error = caught.value
    assert (error.requested_bytes, error.total_bytes) == (40 * MIB - 1, 100 * MIB)
    assert (error.allocated_bytes, error.reserved_bytes) == (64 * MIB, 64 * MIB)


def test_the_device_can_be_filled_to_the_last_byte() -> None:
    allocator = ReferenceAllocator(40 * MIB)
    allocator.malloc(40 * MIB)
    assert (state_mib(allocator), allocator.retries) == ((40, 40), 0)


def test_peaks_stay_when_memory_is_freed_and_start_anew_when_reset(
    allocator: ReferenceAllocator,
) -> None:
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(30 * MIB)
    assert allocator.peak_allocated_bytes == 40 * MIB
    allocator.empty_cache()
    assert allocator.peak_reserved_bytes == 40 * MIB
    allocator.reset_peaks()
    assert allocator.peak_allocated_bytes == 30 * MIB
    assert allocator.peak_reserved_bytes == 40 * MIB  # the rest of 10 MiB is cached


# ---- Misuse


@pytest.mark.parametrize("expandable_segments", [False, True])
def test_freeing_a_block_twice_is_refused(*, expandable_segments: bool) -> None:
    allocator = ReferenceAllocator(
        GIB, AllocatorSettings(expandable_segments=expandable_segments)
    )
    block = allocator.malloc(MIB)
    allocator.free(block)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(block)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot allocate -1 bytes"):
        ReferenceAllocator(GIB).malloc(-1)
