"""Settings of ``PYTORCH_ALLOC_CONF`` in the reference allocator: worked examples."""

import pytest

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.memory.reference_allocator.allocator import (
    OutOfMemory,
    ReferenceAllocator,
    round_bytes,
)

MIB = 1 << 20
GIB = 1 << 30


def allocator(text: str, total_bytes: int = GIB) -> ReferenceAllocator:
    return ReferenceAllocator(total_bytes, AllocatorSettings.parse(text))


def state_mib(made: ReferenceAllocator) -> tuple[int, int]:
    return made.allocated_bytes // MIB, made.reserved_bytes // MIB


@pytest.mark.parametrize(
    ("size_bytes", "rounded_bytes"),
    [
        (1200 * MIB, 1280 * MIB),  # PyTorch's notes: 1200 with 4 is rounded to 1280
        (1024 * MIB, 1024 * MIB),
        (1024 * MIB + 1, 1280 * MIB),
        (1000, 1024),  # below 512 x 4 it is 512 bytes
        (2048, 2048),
        (2049, 2560),
    ],
)
def test_requests_are_rounded_up_to_parts_of_a_power_of_two(
    size_bytes: int, rounded_bytes: int
) -> None:
    assert round_bytes(size_bytes, [4] * 16) == rounded_bytes


def test_a_list_rounds_by_size() -> None:
    made = allocator("roundup_power2_divisions:[64:4,>:0]")
    made.malloc(33 * MIB)  # up to 128 MiB: to quarters
    assert state_mib(made) == (40, 40)
    made.malloc(129 * MIB)
    assert state_mib(made) == (170, 170)


def test_the_small_pool_takes_what_is_small_after_rounding() -> None:
    made = allocator("roundup_power2_divisions:2")
    made.malloc(MIB - 512)  # rounded up to 1 MiB
    assert state_mib(made) == (1, 2)


def test_requests_below_10_mib_share_segments_of_the_size_that_is_set() -> None:
    made = allocator("large_segment_size_mb:64")
    for _ in range(6):
        made.malloc(9 * MIB)
    assert state_mib(made) == (54, 64)


def test_a_fraction_limits_what_is_reserved() -> None:
    made = allocator("per_process_memory_fraction:0.5")
    made.malloc(500 * MIB)
    with pytest.raises(OutOfMemory):
        made.malloc(5 * MIB)  # from a segment of 20
    assert state_mib(made) == (500, 500)
    assert made.retries == 1


def test_a_fraction_of_the_card_limits_no_larger_device() -> None:
    settings = AllocatorSettings(per_process_memory_fraction=0.5)
    made = ReferenceAllocator(4 * GIB, settings, card_bytes=GIB)
    made.malloc(2 * GIB)
    assert state_mib(made) == (2048, 2048)


def test_out_of_memory_can_come_before_the_cache_is_emptied() -> None:
    made = allocator("throw_on_cudamalloc_oom:True")
    made.free(made.malloc(600 * MIB))
    with pytest.raises(OutOfMemory):
        made.malloc(700 * MIB)
    assert state_mib(made) == (0, 600)
    assert made.retries == 0


def collecting() -> ReferenceAllocator:
    """Cached segments of 100, 200 and 300 MiB, the last one used most recently."""
    made = allocator(
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.99", GIB
    )
    blocks = [made.malloc(size * MIB) for size in (100, 200, 300)]
    for block in blocks:
        made.free(block)
        made.free(made.malloc(2 * MIB))  # a search makes what is cached older
    return made


def test_the_oldest_segments_are_collected_before_a_new_one_is_taken() -> None:
    made = collecting()  # 600 MiB and one small segment of 20 MiB, above half
    before = made.reserved_bytes
    made.malloc(400 * MIB)
    assert made.retries == 0
    assert made.reserved_bytes < before + 400 * MIB


def test_nothing_is_collected_below_the_threshold_or_without_a_fraction() -> None:
    low = allocator("garbage_collection_threshold:0.9,per_process_memory_fraction:0.99")
    alone = allocator("garbage_collection_threshold:0.1")
    for made in (low, alone):
        made.free(made.malloc(100 * MIB))
        made.malloc(200 * MIB)
        assert state_mib(made) == (200, 300)
