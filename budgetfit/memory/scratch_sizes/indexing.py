"""Scratch memory of sorts, scans and scattered gradients, with CUB's temporary storage.

CUB's temporary storage depends on the kernel's tile, which is tuned by architecture and
type. The tiles were read off the 2.13.0 binary; GPUs that CUB tunes alike (8.6 and 8.9;
9.0, 10.0 and 12.0) share them. Sorts of keys of 1 or 2 bytes before 9.0 ask for the
occupancy of the real GPU: theirs is an upper bound.

Sources: ``aten/src/ATen/native/cuda/`` ``Indexing.cu``, ``Sort.cu``,
``EmbeddingBackwardKernel.cu``.
"""

from typing import NamedTuple

from budgetfit.memory.scratch_sizes.rules import (
    MAX_INDEX,
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
# Items per tile of DeviceScan, by bytes of an item.
SCAN_TILES = {1: 3840, 2: 3840, 4: 1920, 8: 896, 16: 384}
# Bytes per descriptor of numbers that C has: the state of a tile and its sum. Others
# (16-bit floats, complex numbers) have a state and two sums in arrays of their own.
SCAN_DESCRIPTORS = {1: 4, 2: 4, 4: 8, 8: 16}
SCAN_STATE_BYTES = 4
ONE_TILE_SORT = {8: 2304, 4: 4864}  # most keys, by size, that one thread block sorts
# Radix sorts of small keys before compute capability 9.0 (``spine_length`` in CUB).
SPINE_THREADS = 128  # of a block
SPINE_SUBSCRIPTION = 5
SPINE_DIGITS = {1: 64, 2: 128}
SPINE_PADDING = 11200
# Several blocks share a row from this length on, by number of rows; ``topk``.
SHARED_ROWS = (
    (0, 21, 20_000),
    (21, 41, 10_000),
    (41, 81, 8000),
    (81, 200, 5000),
    (200, 800, 3000),
    (800, 4001, 800),
    (4001, 2**32, 400),
)
SELECTING_THREADS = 256  # of a block of ``topk``
SELECTING_BLOCKS = 6  # of an SM
DIGITS = 256
HALF_BYTES = 2
MANY_ROWS = 128  # as many rows are sorted by one block each
SMALL_SORT = 4096  # longest row that one thread block of Sort.cu sorts
LONGEST_TOGETHER = 1_000_000  # rows of this length are sorted one by one
MOST_SORTED = 2**28 - 1  # keys in one pass of CUB's radix sort
MOST_SCANNED = 2**30  # items in one scan of CUB


class CubTiles(NamedTuple):
    """CUB's items per tile by key size, for ``SortPairs`` and ``UniqueByKey``.

    ``four_byte_pairs``: for sorts of 4-byte keys with 4-byte values; all other values
    have 8 bytes. ``by_key``: for ``InclusiveScanByKey``.
    """

    sort: dict[int, int]
    four_byte_pairs: int
    unique: dict[int, int]
    by_key: dict[int, int]


OLD_BY_KEY = {4: 2304, 8: 2304}
TURING = CubTiles({4: 2816, 8: 2816}, 11744, {4: 704, 8: 320}, OLD_BY_KEY)
AMPERE = CubTiles({4: 3072, 8: 3840}, 6528, {4: 2816, 8: 1344}, {4: 3840, 8: 2240})
ADA = CubTiles({4: 3072, 8: 3840}, 6528, {4: 704, 8: 320}, OLD_BY_KEY)
NEW_SORT = {1: 3456, 2: 5632, 4: 5376, 8: 4608}
NEW_UNIQUE = {4: 7008, 8: 4928}
HOPPER = CubTiles(NEW_SORT, 6528, NEW_UNIQUE, {4: 4032, 8: 2464})
BLACKWELL = CubTiles(NEW_SORT, 6528, NEW_UNIQUE, {4: 4480, 8: 5888})


def tiles_of(device: DeviceProperties) -> CubTiles:
    """Return CUB's tuning for a GPU."""
    capability = device.compute_capability
    if capability < (8, 0):
        return TURING
    if capability == (8, 0):
        return AMPERE
    if capability < (9, 0):
        return ADA
    return HOPPER if capability < (10, 0) else BLACKWELL


def scan_bytes(items: int, element_bytes: int, *, in_arrays: bool = False) -> int:
    """Return ``DeviceScan``'s storage; ``in_arrays``: of no numbers that C has."""
    tiles = ceil_div(items, SCAN_TILES[element_bytes])
    if not in_arrays:
        return _descriptors(tiles, SCAN_DESCRIPTORS[element_bytes])
    arrays = (SCAN_STATE_BYTES, element_bytes, element_bytes)
    sizes = (round_up((tiles + SCAN_PADDING) * each, ALIGNMENT) for each in arrays)
    return sum(sizes) + 2 * SLACK + 1


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
    if tile is None:
        return sum(buffers) + _spine_bytes(device, key_bytes) + 2 * SLACK + 1
    size = sum(buffers) if passes > 1 else 0
    blocks, most = ceil_div(items, tile), MOST_SORTED // tile
    counters = passes * HISTOGRAM_BYTES * ceil_div(blocks, most)
    counters += min(blocks, most) * TILE_BYTES
    return size + counters + 2 * SLACK + 1


def _spine_bytes(device: DeviceProperties, key_bytes: int) -> int:
    """Return the counters of all thread blocks that sort keys of 1 or 2 bytes."""
    # As many blocks as fit the GPU by its threads; their registers may allow fewer.
    blocks = device.sm_count * (device.threads_per_sm // SPINE_THREADS)
    digits = SPINE_DIGITS[key_bytes]
    return (SPINE_SUBSCRIPTION * blocks * digits + SPINE_PADDING) * SINGLE_BYTES


@rule(parts=1)
def scan_by_key(
    device: DeviceProperties, items: int, key_bytes: int, always: int
) -> list[int]:
    """Return the storage of ``InclusiveScanByKey``; none where a scan is not needed."""
    if not items or (items <= FEW_INDICES and not always):
        return [0]
    tiles = ceil_div(items, tiles_of(device).by_key[key_bytes])
    states = round_up((tiles + SCAN_PADDING) * 16, ALIGNMENT)
    return [states + round_up((tiles + 1) * key_bytes, ALIGNMENT) + SLACK]


@rule(parts=8)
def topk(device: DeviceProperties, rows: int, length: int, key_bytes: int) -> list[int]:
    """Return the buffers of a radix selection by several blocks; all 0 with one block.

    Keys found, positions sought, bits of the keys, digits counted in each block and
    each row, keys above and keys equal in each block, scan storage. ``length``: of a
    row. Source: ``mbtopk`` in ``TensorTopK.cu``.
    """
    if not any(low <= rows < high and length >= n for low, high, n in SHARED_ROWS):
        return [0] * 8
    threads = device.sm_count * SELECTING_BLOCKS * SELECTING_THREADS
    each = min(max(ceil_div(rows * length, threads), 4), 64)
    blocks = rows * ceil_div(length, each * SELECTING_THREADS)
    [storage] = scan_by_key(device, blocks, SINGLE_BYTES, 1)
    return [
        rows * key_bytes,
        2 * rows * SINGLE_BYTES,
        2 * rows * max(key_bytes, SINGLE_BYTES),
        blocks * DIGITS * HALF_BYTES,
        rows * DIGITS * SINGLE_BYTES,
        blocks * SINGLE_BYTES,
        blocks * SINGLE_BYTES,
        storage,
    ]


@rule(parts=1)
def scan(_: DeviceProperties, items: int, item_bytes: int, in_arrays: int) -> list[int]:
    """Return [scan storage]; ``in_arrays``: 1 for 16-bit floats and complex numbers."""
    items = min(items, MOST_SCANNED)
    return [scan_bytes(items, item_bytes, in_arrays=bool(in_arrays))]


@rule(parts=5)
def sort(device: DeviceProperties, rows: int, length: int, key_bytes: int) -> list[int]:
    """Return [indices, storage] or, for several long rows, [..., row and index, keys].

    ``length``: of a row. As many rows as have 32-bit indices are sorted at once; very
    long ones one by one.
    """
    if length <= SMALL_SORT:
        return [length * INDEX_BYTES, 0, 0, 0, 0]
    rows = 1 if length >= LONGEST_TOGETHER else min(rows, MAX_INDEX // length)
    items = rows * length
    if rows >= MANY_ROWS:
        both = (round_up(items * size, ALIGNMENT) for size in (key_bytes, INDEX_BYTES))
        return [items * INDEX_BYTES, sum(both) + SLACK, 0, 0, 0]
    storage = radix_sort_bytes(device, items, key_bytes, INDEX_BYTES, key_bytes * 8)
    if rows == 1:
        return [items * INDEX_BYTES, storage, 0, 0, 0]
    return [0, storage, items * INDEX_BYTES, items * INDEX_BYTES, items * key_bytes]


@rule(parts=1)
def index_put_sort(device: DeviceProperties, indices: int, positions: int) -> list[int]:
    """Return the storage of sorting flat indices of so many ``positions``."""
    bits = max(1, (positions - 1).bit_length())
    return [radix_sort_bytes(device, indices, INDEX_BYTES, INDEX_BYTES, bits)]


@rule(parts=2)
def masked_scatter(_: DeviceProperties, elements: int) -> list[int]:
    """Return [prefix sum of the mask, scan storage]."""
    storage = scan_bytes(min(elements, MOST_SCANNED), INDEX_BYTES)
    return [elements * INDEX_BYTES, storage]


# embedding_dense_backward: ``indices`` are counted, ``rows`` are those of the table,
# ``always`` is 1 where they are sorted however few they are.
FEW_INDICES = 3072  # up to here it does not sort
PARTIAL_ROWS = 10  # rows that one partial sum covers
FULL_PARTIALS = 4  # above so many partials per row they are added atomically


def _sorted(indices: int, always: int) -> int:
    """Return the indices if they are sorted, else 0."""
    return indices if always or indices > FEW_INDICES else 0


def _segments(indices: int, rows: int, always: int) -> int:
    """Return the most rows that occur among sorted indices."""
    return min(_sorted(indices, always), rows)


@rule(parts=1)
def embedding_indices(
    _: DeviceProperties, indices: int, index_bytes: int, always: int
) -> list[int]:
    """Return [copied indices]."""
    return [_sorted(indices, always) * index_bytes]


@rule(parts=1)
def embedding_sort(
    device: DeviceProperties, indices: int, rows: int, index_bytes: int, always: int
) -> list[int]:
    """Return the storage of sorting indices with their positions."""
    if not _sorted(indices, always):
        return [0]
    bits = rows.bit_length()
    return [radix_sort_bytes(device, indices, index_bytes, index_bytes, bits)]


@rule(parts=1)
def embedding_unique(
    device: DeviceProperties, indices: int, index_bytes: int, always: int
) -> list[int]:
    """Return the storage of ``UniqueByKey``."""
    if not _sorted(indices, always):
        return [0]
    return [_descriptors(ceil_div(indices, tiles_of(device).unique[index_bytes]), 16)]


@rule(parts=1)
def embedding_segments(
    _: DeviceProperties, indices: int, rows: int, index_bytes: int, always: int
) -> list[int]:
    """Return an index for each segment: the sorted indices of one row."""
    return [_segments(indices, rows, always) * index_bytes]


@rule(parts=1)
def embedding_scan(
    _: DeviceProperties, indices: int, rows: int, index_bytes: int, always: int
) -> list[int]:
    """Return the storage of a scan over the segments."""
    segments = _segments(indices, rows, always)
    return [scan_bytes(segments, index_bytes) if segments else 0]


@rule(parts=1)
def embedding_count(
    _: DeviceProperties, indices: int, count_bytes: int, always: int
) -> list[int]:
    """Return one count."""
    return [count_bytes if _sorted(indices, always) else 0]


@rule(parts=3)
def embedding_partials(device: DeviceProperties, *arguments: int) -> list[int]:
    """Return [first index of each partial, sums of the partials, gradient in fp32].

    A segment is summed in fp32 by parts of 10. Where many indices share few rows the
    second is the segment of each partial, and only there a gradient of 16 bits is
    summed in fp32.

    Arguments: indices, rows, columns, bytes per index, per element, ``always``, 1 for
    bags.
    """
    indices, rows, columns, index_bytes, element_bytes, always, bags = arguments
    segments = _segments(indices, rows, always)
    if not segments:
        return [0, 0, 0]
    partials = indices // PARTIAL_ROWS + segments
    each = partials * index_bytes
    few_rows = segments < 4 * device.sm_count and partials > FULL_PARTIALS * segments
    if few_rows and not bags:
        half = element_bytes < SINGLE_BYTES
        return [each, each, rows * columns * SINGLE_BYTES if half else 0]
    return [each, partials * columns * max(element_bytes, SINGLE_BYTES), 0]
