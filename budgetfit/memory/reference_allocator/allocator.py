"""Reference implementation of PyTorch's CUDA caching allocator, byte for byte.

After each call, ``allocated_bytes`` and ``reserved_bytes`` equal what
``torch.cuda.memory_allocated()`` and ``memory_reserved()`` report after the same
calls on a device of ``total_bytes``. Reserved bytes depend on the order of all mallocs
and frees, so they cannot be computed without simulating them.

Source: ``malloc``, ``get_free_block``, ``alloc_block``, ``should_split``,
``get_allocation_size``, ``release_available_cached_blocks`` and
``release_cached_blocks`` in ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.13, and
``c10/core/AllocatorConfig.h``. Checked against the binary:
``tests/memory/record_allocator_fuzz.py``.

Not modelled: ``garbage_collection_threshold``, ``roundup_power2_divisions``, private
pools (CUDA graphs, ``MemPool``), and frees that wait for another stream
(``record_stream``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from functools import partial
from typing import Final

from budgetfit.memory.reference_allocator.block_pool import (
    ADDRESS_BITS,
    IN_USE,
    Block,
    BlockPool,
    split,
)
from budgetfit.memory.reference_allocator.expandable_segments import (
    least_expandable,
    map_block,
    unmap_block,
)

__all__ = [
    "LARGE_SEGMENT_BYTES",
    "MAX_NON_SPLIT_ROUNDING_BYTES",
    "MIN_BLOCK_BYTES",
    "OWN_SEGMENT_FROM_BYTES",
    "OWN_SEGMENT_STEP_BYTES",
    "SMALL_REQUEST_BYTES",
    "SMALL_SEGMENT_BYTES",
    "Block",
    "OutOfMemory",
    "ReferenceAllocator",
    "round_bytes",
    "segment_bytes",
]

MIN_BLOCK_BYTES: Final = 512  # kMinBlockSize: blocks are multiples of this
SMALL_REQUEST_BYTES: Final = 1 << 20  # kSmallSize: largest request of the small pool
SMALL_SEGMENT_BYTES: Final = 2 << 20  # kSmallBuffer: segment size of that pool
LARGE_SEGMENT_BYTES: Final = 20 << 20  # large_segment_size: requests below 10 MiB
OWN_SEGMENT_FROM_BYTES: Final = 10 << 20  # kMinLargeAlloc: one segment each from here
OWN_SEGMENT_STEP_BYTES: Final = 2 << 20  # kRoundLarge: such segments are multiples
MAX_NON_SPLIT_ROUNDING_BYTES: Final = 20 << 20  # max_non_split_rounding_size

_UNLIMITED_BYTES: Final = 1 << 62


class OutOfMemory(Exception):  # noqa: N818 - PyTorch's word for it
    """Out of memory: the device is full even after the cache was emptied.

    Fields, in bytes: ``requested_bytes`` unrounded, ``allocated_bytes`` and
    ``reserved_bytes`` at the failure, and the device's ``total_bytes``.
    """

    def __init__(
        self,
        requested_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
        total_bytes: int,
    ) -> None:
        super().__init__(requested_bytes, allocated_bytes, reserved_bytes, total_bytes)
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.total_bytes = total_bytes

    def __str__(self) -> str:
        return (
            f"out of memory: {self.requested_bytes} bytes requested with "
            f"{self.allocated_bytes} allocated and {self.reserved_bytes} reserved "
            f"on a device of {self.total_bytes}"
        )


def round_bytes(size_bytes: int) -> int:
    """Return the block size of a request: a multiple of 512, 0 for 0.

    >>> round_bytes(1), round_bytes(512), round_bytes(513)
    (512, 512, 1024)
    """
    return (size_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


class ReferenceAllocator:
    """The caching allocator of a device of ``total_bytes``.

    ``expandable_segments`` and ``max_split_bytes`` (``max_split_size_mb``; ``None``: no
    limit) are settings of ``PYTORCH_CUDA_ALLOC_CONF``. Streams are any ints.

    Attributes, in bytes but for the last: ``allocated_bytes``, ``reserved_bytes``,
    ``peak_allocated_bytes``, ``peak_reserved_bytes``, and ``retries``: how often the
    cache was emptied to make room (``num_alloc_retries``).

    Raises:
        ValueError: ``max_split_bytes`` is below 20 MiB, which PyTorch refuses too.

    >>> allocator = ReferenceAllocator(8 << 30)
    >>> block = allocator.malloc(3_000_000)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (3000320, 20971520)
    >>> allocator.free(block)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (0, 20971520)
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        expandable_segments: bool = False,
        max_split_bytes: int | None = None,
    ) -> None:
        if max_split_bytes is not None and max_split_bytes < LARGE_SEGMENT_BYTES:
            raise ValueError(
                f"max_split_bytes is {max_split_bytes}, but must be at least "
                f"{LARGE_SEGMENT_BYTES} (20 MiB), for example {128 << 20}"
            )
        self.total_bytes = total_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0

        self._expandable = expandable_segments
        self._max_split_bytes = max_split_bytes or _UNLIMITED_BYTES
        self._best_fit_is_plain = not expandable_segments and max_split_bytes is None
        # should_split: large native blocks keep a remainder of up to 1 MiB, and those
        # for requests of max_split_size any remainder.
        self._split_below_bytes = (
            _UNLIMITED_BYTES if expandable_segments else self._max_split_bytes
        )
        least_large_remainder_bytes = (
            MIN_BLOCK_BYTES if expandable_segments else SMALL_REQUEST_BYTES + 1
        )
        self._small = defaultdict[int, BlockPool](
            partial(BlockPool, SMALL_SEGMENT_BYTES, MIN_BLOCK_BYTES)
        )
        self._large = defaultdict[int, BlockPool](
            partial(BlockPool, LARGE_SEGMENT_BYTES, least_large_remainder_bytes)
        )

    def malloc(self, size_bytes: int, stream: int = 0) -> Block | None:
        """Allocate ``size_bytes`` on a stream; return ``None`` for 0 bytes.

        Raises:
            OutOfMemory: The device is full. The cache has then been emptied, as in
                PyTorch; allocated blocks stay valid.
            ValueError: ``size_bytes`` is negative.
        """
        if size_bytes <= 0:
            if size_bytes < 0:
                raise ValueError(f"cannot allocate {size_bytes} bytes")
            return None
        needed_bytes = (size_bytes + 511) & -512  # round_bytes, without the call
        pools = self._small if needed_bytes <= SMALL_REQUEST_BYTES else self._large
        pool = pools[stream]
        keys = pool.keys
        index = bisect_left(keys, needed_bytes << ADDRESS_BITS)
        if not self._best_fit_is_plain:
            index = self._best_fit(pool, index, needed_bytes)
        if index < len(keys):
            block = pool.blocks.pop(keys.pop(index))
        else:
            block = self._from_device(pool, needed_bytes, size_bytes)
        block.state = IN_USE
        if (
            block.size_bytes - needed_bytes >= pool.least_remainder_bytes
            and needed_bytes < self._split_below_bytes
        ):
            pool.add(split(block, needed_bytes))
        # A remainder that is not split off counts as allocated.
        self.allocated_bytes += block.size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:  # noqa: PLR1730 - faster
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block | None) -> None:
        """Return a block to the cache; ``None``, from a malloc of 0 bytes, is ignored.

        Raises:
            ValueError: The block is free already.
        """
        if block is None:
            return
        if block.state != IN_USE:
            raise ValueError(f"the block of {block.size_bytes} bytes is free already")
        self.allocated_bytes -= block.size_bytes
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Release every wholly free segment, or expandable page, to the device."""
        for pool in (*self._large.values(), *self._small.values()):
            for block in tuple(pool.blocks.values()):
                if self._expandable:
                    self.reserved_bytes -= unmap_block(block)
                elif block.below is None and block.above is None:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Reset the peaks to the current values."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _best_fit(self, pool: BlockPool, index: int, needed_bytes: int) -> int:
        """Return the index of the free block to use; ``len(pool.keys)``: none.

        ``index`` is that of the first block that is large enough.
        """
        none = len(pool.keys)
        if index == none:
            return none
        if self._expandable:
            index = least_expandable(pool, index)
        found_bytes = pool.keys[index] >> ADDRESS_BITS
        limit_bytes = self._max_split_bytes
        if needed_bytes < limit_bytes:
            # An oversized block is never split ...
            return index if found_bytes < limit_bytes else none
        # ... nor used for a much smaller request.
        spare_bytes = found_bytes - needed_bytes
        return index if spare_bytes < MAX_NON_SPLIT_ROUNDING_BYTES else none

    def _from_device(
        self, pool: BlockPool, needed_bytes: int, requested_bytes: int
    ) -> Block:
        block = self._grow(pool, needed_bytes)
        if block is None and self._release_oversized(pool, needed_bytes):
            block = self._grow(pool, needed_bytes)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, needed_bytes)
        if block is None:
            raise OutOfMemory(
                requested_bytes,
                self.allocated_bytes,
                self.reserved_bytes,
                self.total_bytes,
            )
        return block

    def _grow(self, pool: BlockPool, needed_bytes: int) -> Block | None:
        """Allocate a new block on the device; return ``None`` if it is full."""
        available_bytes = self.total_bytes - self.reserved_bytes
        if self._expandable:
            # PyTorch reserves addresses for 9/8 of the device.
            block, grown_bytes = map_block(
                pool,
                needed_bytes,
                available_bytes=available_bytes,
                range_bytes=self.total_bytes + self.total_bytes // 8,
            )
        else:
            grown_bytes = segment_bytes(needed_bytes)
            if grown_bytes > available_bytes:
                return None
            block = Block(grown_bytes, pool.next_address, pool, IN_USE)
            pool.next_address += grown_bytes
        self.reserved_bytes += grown_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _release(self, block: Block) -> None:
        """Release a segment that is one free block to the device."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size_bytes

    def _release_oversized(self, pool: BlockPool, needed_bytes: int) -> bool:
        """Release cached oversized blocks; return whether ``needed_bytes`` were freed.

        Blocks from ``max_split_bytes`` on are oversized. They are never split, so each
        is a segment. Without that limit, and with expandable segments, there are none.
        """
        if self._best_fit_is_plain or self._expandable:
            return False
        wanted_bytes = max(needed_bytes, self._max_split_bytes)
        keys = pool.keys
        index = bisect_left(keys, wanted_bytes << ADDRESS_BITS)
        if index < len(keys):
            self._release(pool.blocks[keys[index]])
            return True
        released_bytes = 0
        oversized = bisect_left(keys, self._max_split_bytes << ADDRESS_BITS)
        while released_bytes < wanted_bytes and len(keys) > oversized:
            block = pool.blocks[keys[-1]]
            released_bytes += block.size_bytes
            self._release(block)
        return released_bytes >= wanted_bytes


def segment_bytes(needed_bytes: int) -> int:
    """Return the native segment size of a rounded request (``get_allocation_size``)."""
    if needed_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if needed_bytes < OWN_SEGMENT_FROM_BYTES:
        return LARGE_SEGMENT_BYTES
    steps = -(-needed_bytes // OWN_SEGMENT_STEP_BYTES)
    return steps * OWN_SEGMENT_STEP_BYTES
