"""Reference implementation of PyTorch's CUDA caching allocator, byte for byte.

After each call, ``allocated_bytes`` and ``reserved_bytes`` equal what
``torch.cuda.memory_allocated()`` and ``memory_reserved()`` report after the same
calls on a device of ``total_bytes``. Reserved bytes depend on the order of all mallocs
and frees, so they cannot be computed without simulating them.

Source: ``malloc``, ``get_free_block``, ``alloc_block``, ``should_split``,
``get_allocation_size``, ``release_available_cached_blocks`` and
``release_cached_blocks``, ``garbage_collect_cached_blocks`` and ``round_size`` in
``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.13, and
``c10/core/AllocatorConfig.h``. Checked against the binary:
``tests/memory/record_allocator_fuzz.py``.

Not modelled: private pools (CUDA graphs, ``MemPool``), and frees that wait for another
stream (``record_stream``).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from budgetfit.core.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from budgetfit.memory.reference_allocator.block_pool import (
    ADDRESS_BITS,
    IN_USE,
    UNMAPPED,
    Block,
    BlockPool,
    split,
)
from budgetfit.memory.reference_allocator.expandable_segments import (
    least_expandable,
    map_block,
    unmap_block,
)
from budgetfit.memory.segment_addresses import SegmentAddresses

MIN_BLOCK_BYTES: Final = 512  # kMinBlockSize: blocks are multiples of this
SMALL_REQUEST_BYTES: Final = 1 << 20  # kSmallSize: largest request of the small pool
SMALL_SEGMENT_BYTES: Final = 2 << 20  # kSmallBuffer: segment size of that pool
LARGE_SEGMENT_BYTES: Final = 20 << 20  # large_segment_size: requests below 10 MiB
OWN_SEGMENT_FROM_BYTES: Final = 10 << 20  # kMinLargeAlloc: one segment each from here
OWN_SEGMENT_STEP_BYTES: Final = 2 << 20  # kRoundLarge: such segments are multiples
ROUNDED_FROM_BITS: Final = 20  # roundup_power2_divisions: one for each bit from here

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


def round_bytes(size_bytes: int, divisions: Sequence[int] = ()) -> int:
    """Return the block size of a request: a multiple of 512, 0 for 0.

    With ``roundup_power2_divisions``: the next power of two divided by so many.

    >>> round_bytes(1), round_bytes(512), round_bytes(513)
    (512, 512, 1024)
    >>> round_bytes(1_000_000, [4] * 16), round_bytes(1 << 20, [4] * 16)
    (1048576, 1048576)
    """
    if divisions:
        power = size_bytes.bit_length() - 1
        number = divisions[min(max(power - ROUNDED_FROM_BITS, 0), len(divisions) - 1)]
        if number > 1 and size_bytes > MIN_BLOCK_BYTES * number:
            step = (1 << power) // number
            return -(-size_bytes // step) * step
    return (size_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


class ReferenceAllocator:
    """The caching allocator of a device of ``total_bytes``, with any settings.

    Streams are any ints.

    Args:
        total_bytes: What the process can take of the device.
        settings: Those of ``PYTORCH_ALLOC_CONF``.
        card_bytes: Memory of the card, of which the settings name shares; None:
            ``total_bytes``. If that is more than the card has, there is no limit.

    Attributes, in bytes but for the last: ``allocated_bytes``, ``reserved_bytes``,
    ``peak_allocated_bytes``, ``peak_reserved_bytes``, and ``retries``: how often the
    cache was emptied to make room (``num_alloc_retries``).

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
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        *,
        card_bytes: int | None = None,
    ) -> None:
        self.total_bytes = total_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0

        card_bytes = total_bytes if card_bytes is None else card_bytes
        self.settings = settings
        self._allowed_bytes = (
            settings.allowed_bytes(card_bytes)
            if total_bytes <= card_bytes and settings.per_process_memory_fraction < 1
            else _UNLIMITED_BYTES
        )
        self._throws_above_bytes = (
            card_bytes
            if settings.throw_on_cudamalloc_oom and total_bytes <= card_bytes
            else _UNLIMITED_BYTES
        )
        # PyTorch reserves addresses for 9/8 of the card.
        self._range_bytes = max(total_bytes, card_bytes) * 9 // 8
        self._collect_above_bytes = settings.collect_above_bytes(card_bytes)
        self._expandable = settings.expandable_segments
        self._max_split_bytes = settings.max_split_bytes or _UNLIMITED_BYTES
        self._most_spare_bytes = (
            settings.max_non_split_rounding_bytes or settings.large_segment_bytes
        )
        self._best_fit_is_plain = (
            not self._expandable and settings.max_split_bytes is None
        )
        # should_split: large native blocks keep a remainder of up to 1 MiB, and those
        # for requests of max_split_size any remainder.
        self._split_below_bytes = (
            _UNLIMITED_BYTES if self._expandable else self._max_split_bytes
        )
        least_large_remainder_bytes = (
            MIN_BLOCK_BYTES if self._expandable else SMALL_REQUEST_BYTES + 1
        )
        self._small = defaultdict[int, BlockPool](
            partial(BlockPool, SMALL_SEGMENT_BYTES, MIN_BLOCK_BYTES)
        )
        self._large = defaultdict[int, BlockPool](
            partial(
                BlockPool, settings.large_segment_bytes, least_large_remainder_bytes
            )
        )
        self._addresses = SegmentAddresses()  # of native segments
        self._searches = 0  # of large blocks, on any stream; kept for collection only

    def malloc(self, size_bytes: int, stream: int = 0) -> Block | None:
        """Allocate ``size_bytes`` on a stream; return ``None`` for 0 bytes.

        Raises:
            OutOfMemory: The device is full. As in PyTorch, allocated blocks stay valid,
                and the cache has been emptied unless ``throw_on_cudamalloc_oom``.
            ValueError: ``size_bytes`` is negative.
        """
        if size_bytes <= 0:
            if size_bytes < 0:
                raise ValueError(f"cannot allocate {size_bytes} bytes")
            return None
        needed_bytes = round_bytes(size_bytes, self.settings.roundup_power2_divisions)
        pools = self._small if needed_bytes <= SMALL_REQUEST_BYTES else self._large
        pool = pools[stream]
        keys = pool.keys
        if pools is self._large:
            self._searches += 1
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
            self._cache(split(block, needed_bytes))
        # A remainder that is not split off counts as allocated.
        self.allocated_bytes += block.size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:  # noqa: PLR1730 - faster
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block | None) -> None:
        """Return a block to the cache, or raise if it is free; ``None`` is ignored."""
        if block is None:
            return
        if block.state != IN_USE:
            raise ValueError(f"the block of {block.size_bytes} bytes is free already")
        self.allocated_bytes -= block.size_bytes
        self._cache(block)

    def empty_cache(self) -> None:
        """Release every wholly free segment, or expandable page, to the device."""
        for pool in (*self._large.values(), *self._small.values()):
            for block in tuple(pool.blocks.values()):
                if self._expandable:
                    self.reserved_bytes -= unmap_block(block)
                elif block.below is None and block.above is None:
                    self._release(block)

    def pools(self) -> list[BlockPool]:
        """Return the pools of all streams, those of small requests first."""
        return [*self._small.values(), *self._large.values()]

    def state(self, held: Mapping[int, Block | None]) -> dict[str, Any]:
        """Return what decides how it goes on: with equal states, requests do the same.

        ``held``: the blocks in use, by a number other than 0.
        """
        collects = self._collect_above_bytes is not None
        numbers = {block: number for number, block in held.items() if block is not None}
        alive: dict[BlockPool, list[Block]] = {}
        for block in numbers:
            alive.setdefault(block.pool, []).append(block)

        def row(block: Block) -> tuple[int, int, int, bool, int, int]:
            return (
                block.address,
                block.size_bytes,
                block.state,
                block.below is None,
                numbers.get(block, 0),
                block.cached_at if collects else 0,
            )

        pools = []
        for is_small, of_size in ((True, self._small), (False, self._large)):
            for stream, pool in of_size.items():
                free = (*pool.blocks.values(), *pool.unmapped)
                rows = sorted(map(row, (*alive.get(pool, ()), *free)))
                pools.append((is_small, stream, pool.next_address, rows))
        return {
            "bytes": (self.allocated_bytes, self.reserved_bytes, self.retries),
            "addresses": self._addresses.copy(),
            "searches": self._searches if collects else 0,
            "pools": pools,
            "empty": {number for number, block in held.items() if block is None},
        }

    def restore(self, state: Mapping[str, Any]) -> dict[int, Block | None]:
        """Go on from a state of the same device and settings; return what is held."""
        self.allocated_bytes, self.reserved_bytes, self.retries = state["bytes"]
        self._addresses, self._searches = state["addresses"].copy(), state["searches"]
        self._small.clear()
        self._large.clear()
        held: dict[int, Block | None] = dict.fromkeys(state["empty"])
        for is_small, stream, next_address, blocks in state["pools"]:
            pool = (self._small if is_small else self._large)[stream]
            pool.next_address = next_address
            below: Block | None = None
            for address, size_bytes, status, starts_segment, number, cached in blocks:
                block = Block(size_bytes, address, pool, status)
                block.cached_at = cached
                if not starts_segment and below is not None:
                    block.below, below.above = below, block
                below = block
                if status == IN_USE:
                    held[number] = block
                elif status == UNMAPPED:
                    pool.unmapped.append(block)
                else:
                    pool.blocks[size_bytes << ADDRESS_BITS | address] = block
            pool.keys = sorted(pool.blocks)
        return held

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
        return index if spare_bytes < self._most_spare_bytes else none

    def _cache(self, block: Block) -> None:
        """Add a block to the free ones of its pool."""
        block.pool.add(block)
        block.cached_at = self._searches

    def _from_device(
        self, pool: BlockPool, needed_bytes: int, requested_bytes: int
    ) -> Block:
        if self._collect_above_bytes is not None:
            self._collect(self._collect_above_bytes)
        block = self._grow(pool, needed_bytes, requested_bytes)
        if block is None and self._release_oversized(pool, needed_bytes):
            block = self._grow(pool, needed_bytes, requested_bytes)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, needed_bytes, requested_bytes)
        if block is None:
            raise self._out_of_memory(requested_bytes)
        return block

    def _out_of_memory(self, requested_bytes: int) -> OutOfMemory:
        return OutOfMemory(
            requested_bytes, self.allocated_bytes, self.reserved_bytes, self.total_bytes
        )

    def _grow(
        self, pool: BlockPool, needed_bytes: int, requested_bytes: int
    ) -> Block | None:
        """Allocate a new block on the device; return ``None`` if it is full."""
        available_bytes = self.total_bytes - self.reserved_bytes
        grown_bytes = segment_bytes(needed_bytes, self.settings.large_segment_bytes)
        # Expandable segments, too, are held to what is allowed by the native size.
        if self.reserved_bytes + grown_bytes > self._allowed_bytes:
            return None
        if self.reserved_bytes + grown_bytes > self._throws_above_bytes:
            raise self._out_of_memory(requested_bytes)
        if self._expandable:
            block, grown_bytes = map_block(
                pool,
                needed_bytes,
                available_bytes=available_bytes,
                range_bytes=self._range_bytes,
            )
        else:
            if grown_bytes > available_bytes:
                return None
            block = Block(grown_bytes, self._addresses.take(grown_bytes), pool, IN_USE)
        self.reserved_bytes += grown_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _release(self, block: Block) -> None:
        """Release a segment that is one free block to the device."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size_bytes

    def _collect(self, threshold_bytes: int) -> None:
        """Release the oldest cached segments (``garbage_collect_cached_blocks``)."""
        # The age of a block is the number of searches since it was cached.
        excess_bytes = self.reserved_bytes - threshold_bytes
        if excess_bytes <= 0 or self._expandable:
            return
        left = [
            block
            for pool in self._large.values()
            for block in pool.blocks.values()
            if block.below is None and block.above is None
        ]
        while left and excess_bytes > 0:
            ages = [self._searches - block.cached_at for block in left]
            mean_age = sum(ages) / len(left)
            for block, age in zip(left, ages, strict=True):
                if age >= mean_age:
                    excess_bytes -= block.size_bytes
                    self._release(block)
            left = [
                block for block, age in zip(left, ages, strict=True) if age < mean_age
            ]

    def _release_oversized(self, pool: BlockPool, needed_bytes: int) -> bool:
        """Release cached oversized blocks; return if ``needed_bytes`` were freed."""
        # Blocks from ``max_split_bytes`` on are oversized. They are never split, so
        # each is a segment. Without that limit, and with expandable segments, there are
        # none.
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


def segment_bytes(
    needed_bytes: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES
) -> int:
    """Return the native segment size of a rounded request (``get_allocation_size``)."""
    if needed_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if needed_bytes < OWN_SEGMENT_FROM_BYTES:
        return large_segment_bytes
    steps = -(-needed_bytes // OWN_SEGMENT_STEP_BYTES)
    return steps * OWN_SEGMENT_STEP_BYTES
