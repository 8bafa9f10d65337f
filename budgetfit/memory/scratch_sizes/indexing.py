"""Scratch memory of sorts, scans and scattered gradients, with CUB's temporary storage.

CUB's temporary storage depends on the kernel's tile, which is tuned by architecture and
type. The tiles were read off the 2.13.0 binary; GPUs that CUB tunes alike (8.6 and 8.9;
9.0, 10.0 and 12.0) share them. Not represented: keys of 1 or 2 bytes before 9.0, whose
kernel queries the occupancy of the real GPU.

Sources: ``aten/src/ATen/native/cuda/`` ``Indexing.cu``, ``Sort.cu``,
``EmbeddingBackwardKernel.cu``.
"""

from __future__ import annotations

from typing import NamedTuple

from budgetfit.memory.scratch_sizes.rules import (
    DeviceProperties,
    ceil_div,
    round_up,
    rule,
)

INDEX_BYTES = 8
SINGLE_BYTES = 4
ALIGNMENT = 256
SLACK = ALIGNMENT - 1
HISTOGRAM_BYTES = 2048  # of one pass over 8 bits
TILE_BYTES = 1024  # of 256 counters
DIGIT_BITS = 8
SCAN_PADDING = 32  # tile descriptors
ONE_TILE_SORT = {8: 2304, 4: 4864}  # most keys, by size, that one thread block sorts
SMALL_SORT = 4096  # longest row that one thread block of Sort.cu sorts


class CubTiles(NamedTuple):
    """CUB's items per tile by key size, for ``SortPairs`` and ``UniqueByKey``.

    ``four_byte_pairs``: for sorts of 4-byte keys with 4-byte values; all other values
    have 8 bytes.
    """

    sort: dict[int, int]
    four_byte_pairs: int
    unique: dict[int, int]


TURING = CubTiles({4: 2816, 8: 2816}, 11744, {4: 704, 8: 320})
AMPERE = CubTiles({4: 3072, 8: 3840}, 6528, {4: 2816, 8: 1344})
ADA = CubTiles({4: 3072, 8: 3840}, 6528, {4: 704, 8: 320})
HOPPER = CubTiles({1: 5632, 2: 5632, 4: 5376, 8: 4608}, 6528, {4: 7008, 8: 4928})


def tiles_of(device: DeviceProperties) -> CubTiles:
    """Return CUB's tuning for a GPU."""
    capability = device.compute_capability
    if capability < (8, 0):
        return TURING
    if capability == (8, 0):
        return AMPERE
    return ADA if capability < (9, 0) else HOPPER


def scan_bytes(items: int, element_bytes: int) -> int:
    """Return the temporary storage of ``DeviceScan``."""
    tile, state = (896, 16) if element_bytes > SINGLE_BYTES else (1920, 8)
    return _descriptors(ceil_div(items, tile), state)


def unique_bytes(device: DeviceProperties, items: int, key_bytes: int) -> int:
    """Return the temporary storage of ``UniqueByKey``."""
    return _descriptors(ceil_div(items, tiles_of(device).unique[key_bytes]), 16)


def _descriptors(tiles: int, state_bytes: int) -> int:
    return round_up((tiles + SCAN_PADDING) * state_bytes, ALIGNMENT) + 2 * SLACK + 1


def radix_sort_bytes(
    device: DeviceProperties, items: int, key_bytes: int, value_bytes: int, bits: int
) -> int:
    """Return the temporary storage of ``SortPairs`` by the lowest ``bits`` of a key."""
    if value_bytes == key_bytes and items <= ONE_TILE_SORT.get(key_bytes, 0):
        return 1
    tiles = tiles_of(device)
    tile = tiles.sort.get(key_bytes)
    if value_bytes == SINGLE_BYTES:
        tile = tiles.four_byte_pairs
    passes = ceil_div(bits, DIGIT_BITS)
    buffers = [round_up(items * size, ALIGNMENT) for size in (key_bytes, value_bytes)]
    size = sum(buffers) if passes > 1 else 0
    if tile is None:
        return size
    counters = passes * HISTOGRAM_BYTES + ceil_div(items, tile) * TILE_BYTES
    return size + counters + 2 * SLACK + 1


@rule(parts=1)
def scan(_: DeviceProperties, items: int, item_bytes: int) -> list[int]:
    """Return [scan storage] in bytes."""
    return [scan_bytes(items, item_bytes)]


@rule(parts=5)
def sort(device: DeviceProperties, rows: int, length: int, key_bytes: int) -> list[int]:
    """Return [indices, storage] or, for several long rows, [..., row and index, keys].

    ``length``: of a row.
    """
    items = rows * length
    if length <= SMALL_SORT:
        return [length * INDEX_BYTES, 0, 0, 0, 0]
    storage = radix_sort_bytes(device, items, key_bytes, INDEX_BYTES, key_bytes * 8)
    if rows == 1:
        return [items * INDEX_BYTES, storage, 0, 0, 0]
    return [0, storage, items * INDEX_BYTES, items * INDEX_BYTES, items * key_bytes]


@rule(parts=1)
def index_put_sort(device: DeviceProperties, indices: int, positions: int) -> list[int]:
    """Return the storage of sorting flat indices with their positions.

    ``positions``: size of the dimension that they index.
    """
    bits = max(1, (positions - 1).bit_length())
    return [radix_sort_bytes(device, indices, INDEX_BYTES, INDEX_BYTES, bits)]


@rule(parts=2)
def masked_scatter(_: DeviceProperties, elements: int) -> list[int]:
    """Return [prefix sum of the mask, scan storage]."""
    return [elements * INDEX_BYTES, scan_bytes(elements, INDEX_BYTES)]


# embedding_dense_backward: ``indices`` are counted, ``rows`` are those of the table.
FEW_INDICES = 3072  # up to here it does not sort
PARTIAL_ROWS = 10  # rows that one partial sum covers
FULL_PARTIALS = 4  # above so many partials per row they are added atomically


def _segments(indices: int, rows: int) -> int:
    """Return the most rows that occur among the indices; 0 where they are few."""
    return min(indices, rows) if indices > FEW_INDICES else 0


@rule(parts=1)
def embedding_indices(_: DeviceProperties, indices: int, index_bytes: int) -> list[int]:
    """Return [copied indices]."""
    return [indices * index_bytes if indices > FEW_INDICES else 0]


@rule(parts=1)
def embedding_sort(
    device: DeviceProperties, indices: int, rows: int, index_bytes: int
) -> list[int]:
    """Return the storage of sorting indices with their positions."""
    if indices <= FEW_INDICES:
        return [0]
    bits = rows.bit_length()
    return [radix_sort_bytes(device, indices, index_bytes, index_bytes, bits)]


@rule(parts=1)
def embedding_unique(
    device: DeviceProperties, indices: int, index_bytes: int
) -> list[int]:
    """Return the storage of ``UniqueByKey``."""
    few = indices <= FEW_INDICES
    return [0 if few else unique_bytes(device, indices, index_bytes)]


@rule(parts=1)
def embedding_segments(
    _: DeviceProperties, indices: int, rows: int, index_bytes: int
) -> list[int]:
    """Return an index for each segment: the sorted indices of one row."""
    return [_segments(indices, rows) * index_bytes]


@rule(parts=1)
def embedding_scan(
    _: DeviceProperties, indices: int, rows: int, index_bytes: int
) -> list[int]:
    """Return the storage of a scan over the segments."""
    segments = _segments(indices, rows)
    return [scan_bytes(segments, index_bytes) if segments else 0]


@rule(parts=1)
def embedding_count(_: DeviceProperties, indices: int, count_bytes: int) -> list[int]:
    """Return one count."""
    return [count_bytes if indices > FEW_INDICES else 0]


@rule(parts=3)
def embedding_partials(device: DeviceProperties, *arguments: int) -> list[int]:
    """Return [first index of each partial, sums of the partials, gradient in fp32].

    A segment is summed in fp32 by parts of 10. Where many indices share few rows the
    second is the segment of each partial, and only there a gradient of 16 bits is
    summed in fp32.

    Arguments: indices, rows, columns, bytes per index, per element.
    """
    indices, rows, columns, index_bytes, element_bytes = arguments
    segments = _segments(indices, rows)
    if not segments:
        return [0, 0, 0]
    partials = indices // PARTIAL_ROWS + segments
    each = partials * index_bytes
    if segments < 4 * device.sm_count and partials > FULL_PARTIALS * segments:
        half = element_bytes < SINGLE_BYTES
        return [each, each, rows * columns * SINGLE_BYTES if half else 0]
    return [each, partials * columns * SINGLE_BYTES, 0]
