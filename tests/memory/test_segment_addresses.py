"""Where segments lie: in chunks, each below those before it."""

from unittest import mock

from budgetfit.memory.segment_addresses import CHUNK_BYTES, SegmentAddresses

MIB = 1 << 20


def order(*sizes_mib: int) -> list[int]:
    """The segments of these sizes, by number, from low to high addresses."""
    addresses = SegmentAddresses()
    placed = [addresses.take(size * MIB) for size in sizes_mib]
    return sorted(range(len(placed)), key=placed.__getitem__)


def test_segments_fill_a_chunk_upwards_and_chunks_lie_below_each_other() -> None:
    assert CHUNK_BYTES == 128 * MIB
    assert order(40, 40, 40) == [0, 1, 2]  # in one chunk
    assert order(40, 40, 50, 50) == [2, 3, 0, 1]  # the third one has no room there
    assert order(140, 140) == [1, 0]  # two chunks each


def test_the_newest_chunk_with_room_is_taken() -> None:
    assert order(100, 100, 20, 20) == [1, 2, 0, 3]
    assert order(140, 128, 20) == [1, 0, 2]  # what 140 MiB leave of 256


def test_a_copy_goes_on_alone() -> None:
    one = SegmentAddresses()
    first = one.take(60 * MIB)
    other = one.copy()
    assert one.take(300 * MIB) < first
    assert other.take(20 * MIB) > first


def test_rising_addresses_rise() -> None:
    with mock.patch.object(SegmentAddresses, "rise", new=True):
        assert order(40, 140, 2, 20) == [0, 1, 2, 3]
