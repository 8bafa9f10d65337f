"""The simulated allocator of a replay: the quick one, or the reference.

Most settings of ``PYTORCH_ALLOC_CONF`` leave how blocks are found and split as it is;
the others take the reference implementation, with which a replay takes 1.2 to 1.5
times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.core.step_trace import EMPTY_CACHE
from budgetfit.memory.caching_allocator import (
    NO_STREAMS,
    AllocatorRun,
    AllocatorState,
    CachingAllocator,
    MappedBlock,
)
from budgetfit.memory.reference_allocator.allocator import (
    MIN_BLOCK_BYTES,
    ROUNDED_FROM_BITS,
    OutOfMemory,
    ReferenceAllocator,
)
from budgetfit.memory.reference_allocator.block_pool import UNMAPPED, Block

_POOL_ADDRESSES: Final = 1 << 46  # more than any pool has


def make_allocator(
    total_bytes: int,
    settings: AllocatorSettings,
    card_bytes: int,
    streams: Mapping[int, int] = NO_STREAMS,
) -> SimulatedAllocator:
    """Return the allocator of a device; other arguments as for ``ReferenceAllocator``.

    ``streams``: of the mallocs that are not on the default stream, by event.
    """
    if (
        settings.expandable_segments
        or settings.max_split_bytes is not None
        or settings.throw_on_cudamalloc_oom
        or settings.collect_above_bytes(card_bytes) is not None
    ):
        return ReferenceEvents(total_bytes, settings, card_bytes, streams)
    total_bytes = settings.within(total_bytes, card_bytes)
    return CachingAllocator(total_bytes, settings.large_segment_bytes, streams)


def rounded_bytes(
    sizes: NDArray[np.int64], settings: AllocatorSettings
) -> NDArray[np.int64]:
    """Round requests up to block sizes, as ``round_bytes`` does one by one."""
    rounded = (sizes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
    if not any(settings.roundup_power2_divisions):
        return rounded
    divisions = np.array(settings.roundup_power2_divisions, np.int64)
    # Exact: below 2**53 a float holds every whole number, and no request is larger.
    power = np.frexp(np.maximum(sizes, 1).astype(np.float64))[1].astype(np.int64) - 1
    number = divisions[np.clip(power - ROUNDED_FROM_BITS, 0, len(divisions) - 1)]
    applies = (number > 1) & (sizes > MIN_BLOCK_BYTES * number)
    step = np.where(applies, (1 << power) // np.maximum(number, 1), 1)
    return np.where(applies, -(-sizes // step) * step, rounded)


class ReferenceEvents:
    """The reference allocator, run on lists of events as ``CachingAllocator`` is."""

    def __init__(
        self,
        total_bytes: int,
        settings: AllocatorSettings,
        card_bytes: int,
        streams: Mapping[int, int],
    ) -> None:
        self._made_for = total_bytes, settings, card_bytes, streams
        self._streams = streams
        # The sizes of a run are rounded already: they stay as they are.
        self._allocator = ReferenceAllocator(
            total_bytes, settings, card_bytes=card_bytes
        )
        self._blocks: dict[int, Block | None] = {}
        self.failed_event: int | None = None

    @property
    def retries(self) -> int:
        """How often the cache was emptied."""
        return self._allocator.retries

    @property
    def reserved_bytes(self) -> int:
        """As ``torch.cuda.memory_reserved()``."""
        return self._allocator.reserved_bytes

    def block_of(self, storage: int) -> tuple[int, int] | None:
        """Return address and size of a storage's block; None where it has none."""
        block = self._blocks.get(storage)
        if block is None:
            return None
        return self._address(block), block.size_bytes

    def blocks(self) -> list[MappedBlock]:
        """Return all blocks of all segments, by address."""
        used = [
            (block, storage)
            for storage, block in self._blocks.items()
            if block is not None
        ]
        pools = self._allocator.pools()
        free = [(block, 0) for pool in pools for block in pool.blocks.values()]
        return sorted(
            MappedBlock(
                self._address(block),
                block.size_bytes,
                storage,
                starts_segment=block.below is None or block.below.state == UNMAPPED,
            )
            for block, storage in (*used, *free)
        )

    def _address(self, block: Block) -> int:
        """Return an address of its own: each pool counts from 0."""
        number = self._allocator.pools().index(block.pool)
        return number * _POOL_ADDRESSES + block.address

    def run(self, events: list[int], sizes: list[int]) -> AllocatorRun:
        """Run events as ``CachingAllocator.run``."""
        allocator, blocks = self._allocator, self._blocks
        allocator.reset_peaks()
        deltas = []
        for event in events:
            if event > 0:
                try:
                    block = blocks[event] = allocator.malloc(
                        sizes[event - 1], self._streams.get(event, 0)
                    )
                except OutOfMemory:
                    self.failed_event = event
                    break
                deltas.append(0 if block is None else block.size_bytes)
            elif event == EMPTY_CACHE:
                allocator.empty_cache()
                deltas.append(0)
            else:
                block = blocks.pop(-event, None)
                deltas.append(0 if block is None else -block.size_bytes)
                allocator.free(block)
        return AllocatorRun(
            np.array(deltas, np.int64),
            allocator.peak_allocated_bytes,
            allocator.peak_reserved_bytes,
        )

    def state(self) -> AllocatorState:
        """Return what decides how it goes on: with equal states, events do the same."""
        return self._allocator.state(self._blocks) | {"failed": self.failed_event}

    def restore(self, state: AllocatorState) -> None:
        """Go on from the state of an allocator of the same device and settings."""
        self._blocks = self._allocator.restore(state)
        self.failed_event = state["failed"]

    def copy(self) -> ReferenceEvents:
        """Return an allocator in the same state, which runs on its own."""
        other = ReferenceEvents(*self._made_for)
        other.restore(self.state())
        return other


SimulatedAllocator: TypeAlias = CachingAllocator | ReferenceEvents
