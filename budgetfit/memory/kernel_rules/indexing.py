"""Scratch memory of sorts, scans and scattered gradients, CUB's storage included.

Sizes of CUB's temporary storage depend on the tile of the kernel, tuned by architecture
and type. The tiles were read off the 2.13.0 binary; those of reference cards that CUB
tunes alike (8.6 and 8.9; 9.0, 10.0 and 12.0) are shared. Not represented: keys of 1 or
2 bytes before 9.0, whose kernel asks for the occupancy of the real card.

Sources: ``aten/src/ATen/native/cuda/`` ``Indexing.cu``, ``Sort.cu``,
``EmbeddingBackwardKernel.cu``; rules M35 and M39 of cuda-memory.md.
"""

from __future__ import annotations

from typing import NamedTuple

from budgetfit.memory.kernel_rules.registry import (
    KernelCard,
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


class Tiles(NamedTuple):
    """Items per tile by key size: sorts of pairs, and picking the first of equal keys.

    ``with_same`` are values of the size of 4-byte keys; all others are 8 bytes wide.
    """

    sort: dict[int, int]
    with_same: int
    unique: dict[int, int]


TURING = Tiles({4: 2816, 8: 2816}, 11744, {4: 704, 8: 320})
AMPERE = Tiles({4: 3072, 8: 3840}, 6528, {4: 2816, 8: 1344})
ADA = Tiles({4: 3072, 8: 3840}, 6528, {4: 704, 8: 320})
HOPPER = Tiles({1: 5632, 2: 5632, 4: 5376, 8: 4608}, 6528, {4: 7008, 8: 4928})


def tiles_of(card: KernelCard) -> Tiles:
    """Return the tuning of a card."""
    capability = card.compute_capability
    if capability < (8, 0):
        return TURING
    if capability == (8, 0):
        return AMPERE
    return ADA if capability < (9, 0) else HOPPER


def scan_bytes(items: int, element_bytes: int) -> int:
    """Return the temporary storage of a running sum."""
    tile, state = (896, 16) if element_bytes > SINGLE_BYTES else (1920, 8)
    return _descriptors(ceil_div(items, tile), state)


def unique_bytes(card: KernelCard, items: int, key_bytes: int) -> int:
    """Return the temporary storage of picking the first of equal neighbours."""
    return _descriptors(ceil_div(items, tiles_of(card).unique[key_bytes]), 16)


def _descriptors(tiles: int, state_bytes: int) -> int:
    return round_up((tiles + SCAN_PADDING) * state_bytes, ALIGNMENT) + 2 * SLACK + 1


def radix_sort_bytes(
    card: KernelCard, items: int, key_bytes: int, value_bytes: int, bits: int
) -> int:
    """Return the temporary storage of sorting pairs by the lowest ``bits`` of a key."""
    if value_bytes == key_bytes and items <= ONE_TILE_SORT.get(key_bytes, 0):
        return 1
    tiles = tiles_of(card)
    tile = tiles.sort.get(key_bytes)
    if value_bytes == SINGLE_BYTES:
        tile = tiles.with_same
    passes = ceil_div(bits, DIGIT_BITS)
    buffers = [round_up(items * size, ALIGNMENT) for size in (key_bytes, value_bytes)]
    size = sum(buffers) if passes > 1 else 0
    if tile is None:
        return size
    counters = passes * HISTOGRAM_BYTES + ceil_div(items, tile) * TILE_BYTES
    return size + counters + 2 * SLACK + 1


@rule("scan", parts=1)
def scan(_card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return the storage of a running sum. Arguments: items, bytes per item."""
    return [scan_bytes(*arguments)]


@rule("sort", parts=5)
def sort(card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return [places, storage] or, for several long rows, [..., row and place, keys].

    Arguments: rows, their length, bytes per key.
    """
    rows, length, key = arguments
    items = rows * length
    if length <= SMALL_SORT:
        return [length * INDEX_BYTES, 0, 0, 0, 0]
    storage = radix_sort_bytes(card, items, key, INDEX_BYTES, key * 8)
    if rows == 1:
        return [items * INDEX_BYTES, storage, 0, 0, 0]
    return [0, storage, items * INDEX_BYTES, items * INDEX_BYTES, items * key]


@rule("index_put_sort", parts=1)
def index_put_sort(card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return the storage of sorting flat indices with their places.

    Arguments: indices, positions that they choose from.
    """
    indices, positions = arguments
    bits = max(1, (positions - 1).bit_length())
    return [radix_sort_bytes(card, indices, INDEX_BYTES, INDEX_BYTES, bits)]


@rule("masked_scatter", parts=2)
def masked_scatter(_card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return [running count of the mask, storage]. Argument: elements."""
    return [arguments[0] * INDEX_BYTES, scan_bytes(arguments[0], INDEX_BYTES)]


FEW_INDICES = 3072  # up to here an embedding backward needs no sort
PARTIAL_ROWS = 10  # rows that one partial sum covers
FULL_PARTIALS = 4  # more partials than so many per row: they are added atomically


def _segments(indices: int, rows: int) -> int:
    """Return the most rows of the table that are asked for."""
    return min(indices, rows)


@rule("embedding_indices", parts=1)
def embedding_indices(_card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return one row of indices, or 0 for few. Arguments: indices, bytes per index."""
    indices, index = arguments
    return [indices * index if indices > FEW_INDICES else 0]


@rule("embedding_sort", parts=1)
def embedding_sort(card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return the storage of sorting indices with their places.

    Arguments: indices, rows of the table, bytes per index.
    """
    indices, rows, index = arguments
    if indices <= FEW_INDICES:
        return [0]
    return [radix_sort_bytes(card, indices, index, index, rows.bit_length())]


@rule("embedding_unique", parts=1)
def embedding_unique(card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return the storage of finding segments. Arguments: indices, bytes per index."""
    indices, index = arguments
    return [unique_bytes(card, indices, index) if indices > FEW_INDICES else 0]


@rule("embedding_segments", parts=1)
def embedding_segments(_card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return a number for each segment: one row's share of the sorted indices.

    Arguments: indices, rows of the table, bytes per index.
    """
    indices, rows, index = arguments
    return [_segments(indices, rows) * index if indices > FEW_INDICES else 0]


@rule("embedding_scan", parts=1)
def embedding_scan(_card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return the storage of a running sum over the segments.

    Arguments: indices, rows of the table, bytes per index.
    """
    indices, rows, index = arguments
    few = indices <= FEW_INDICES
    return [0 if few else scan_bytes(_segments(indices, rows), index)]


@rule("embedding_count", parts=1)
def embedding_count(_card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return one number, or nothing for few indices. Arguments: indices, its bytes."""
    indices, number = arguments
    return [number if indices > FEW_INDICES else 0]


@rule("embedding_partials", parts=3)
def embedding_partials(card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return [first index of each partial, sums of the partials, gradient in fp32].

    A segment is summed in fp32 by parts of 10. Where many indices share few rows the
    second is the segment of each partial, and only there a gradient of 16 bits is
    summed in fp32.

    Arguments: indices, rows of the table, columns, bytes per index, per element.
    """
    indices, rows, columns, index, element = arguments
    if indices <= FEW_INDICES:
        return [0, 0, 0]
    segments = _segments(indices, rows)
    partials = indices // PARTIAL_ROWS + segments
    each = partials * index
    if segments < 4 * card.sm_count and partials > FULL_PARTIALS * segments:
        single = rows * columns * SINGLE_BYTES if element < SINGLE_BYTES else 0
        return [each, each, single]
    return [each, partials * columns * SINGLE_BYTES, 0]
