"""Simulate PyTorch's CUDA caching allocator for a whole list of mallocs and frees.

One loop over plain ints, for native segments and no ``max_split_size_mb``:
what most replays need; ``make_allocator.py`` has the others. It returns the block
size of each event, and its state can be copied. Tests compare it with
``memory.reference_allocator``, which cites the source.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import EMPTY_CACHE
from budgetfit.memory.reference_allocator.allocator import (
    LARGE_SEGMENT_BYTES,
    SMALL_REQUEST_BYTES,
    segment_bytes,
)
from budgetfit.memory.segment_addresses import SegmentAddresses

# A block is one int, its size and then its address: ints compare faster than tuples.
_ADDRESS_BITS: Final = 50
_ADDRESSES: Final = (1 << _ADDRESS_BITS) - 1
NO_STREAMS: Final[Mapping[int, int]] = MappingProxyType({})  # all on the default one


class AllocatorRun(NamedTuple):
    """Result of a list of events, in bytes.

    ``deltas``: the change of allocated bytes at each event (the block size, negative
    for a free, 0 for an empty request). It ends early where memory runs out.
    """

    deltas: NDArray[np.int64]
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class MappedBlock(NamedTuple):
    """A block of reserved memory, in bytes, and what is in it (0: it is free)."""

    address: int
    size_bytes: int
    storage: int
    starts_segment: bool


AllocatorState = dict[str, Any]  # of the allocator's attributes


class CachingAllocator:
    """The caching allocator of a device of ``total_bytes``, with default settings.

    ``large_segment_bytes`` is the only other one; requests are rounded by the caller.
    Each CUDA stream has pools of its own: ``streams`` are those of the mallocs that are
    not on the default one, by event.

    Which of two free blocks of equal size is taken depends on their addresses
    (``SegmentAddresses``).

    Attributes:
        allocated_bytes: As ``torch.cuda.memory_allocated()``.
        reserved_bytes: As ``torch.cuda.memory_reserved()``.
        retries: How often the cache was emptied to make room (``num_alloc_retries``).
        failed_event: The malloc that ran out of memory even then, or None.
    """

    def __init__(
        self,
        total_bytes: int,
        large_segment_bytes: int = LARGE_SEGMENT_BYTES,
        streams: Mapping[int, int] = NO_STREAMS,
    ) -> None:
        self.total_bytes = total_bytes
        self.large_segment_bytes = large_segment_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.retries = 0
        self.failed_event: int | None = None
        self._streams = streams
        # Free blocks by size and address, small and large ones, of each stream.
        self._pools: dict[int, tuple[list[int], list[int]]] = {
            stream: ([], []) for stream in (0, *streams.values())
        }
        self._starts: dict[int, int] = {}  # free blocks by start address
        self._ends: dict[int, int] = {}  # and by end address
        self._in_use: dict[int, int] = {}
        self._segments: dict[int, int] = {}  # sizes by start address
        self._addresses = SegmentAddresses()
        self._peak_reserved_bytes = 0

    def run(self, events: list[int], sizes: list[int]) -> AllocatorRun:
        """Run events: ``k`` is a malloc of ``sizes[k - 1]``, ``-k`` its free.

        ``EMPTY_CACHE`` empties the cache. Sizes are multiples of 512.
        """
        self._peak_reserved_bytes = self.reserved_bytes
        deltas = np.array(self._deltas(events, sizes), np.int64)
        alive = self.allocated_bytes + deltas.cumsum()
        peak = int(alive.max(initial=self.allocated_bytes))
        self.allocated_bytes += int(deltas.sum())
        return AllocatorRun(deltas, peak, self._peak_reserved_bytes)

    def state(self) -> AllocatorState:
        """Return what decides how it goes on: with equal states, events do the same."""
        state = _copied(vars(self))
        del state["_peak_reserved_bytes"]  # of the last run
        return state

    def restore(self, state: AllocatorState) -> None:
        """Go on from the state of an allocator of the same device and streams."""
        vars(self).update(_copied(state))

    def copy(self) -> CachingAllocator:
        """Return an allocator in the same state, which runs on its own."""
        other = copy.copy(self)
        other.restore(self.state())
        return other

    def block_of(self, storage: int) -> tuple[int, int] | None:
        """Return address and size of a storage's block; None where it has none."""
        key = self._in_use.get(storage, 0)
        return (key & _ADDRESSES, key >> _ADDRESS_BITS) if key else None

    def blocks(self) -> list[MappedBlock]:
        """Return all blocks of all segments, by address."""
        used = (
            (key & _ADDRESSES, key >> _ADDRESS_BITS, storage)
            for storage, key in self._in_use.items()
        )
        free = (
            (address, key >> _ADDRESS_BITS, 0) for address, key in self._starts.items()
        )
        return [
            MappedBlock(*block, starts_segment=block[0] in self._segments)
            for block in sorted((*used, *free))
        ]

    def _deltas(self, events: list[int], sizes: list[int]) -> list[int]:  # noqa: C901, PLR0912, PLR0915 - one loop
        """Return the change of allocated bytes at each event."""
        # One long loop on purpose: most of a replay's time is spent here, and with
        # frees in a method of their own it took 4 to 6 % longer.
        streams, pools, in_use = self._streams, self._pools, self._in_use
        starts, ends, (small, large) = self._starts, self._ends, pools[0]
        bits, addresses, most_small = _ADDRESS_BITS, _ADDRESSES, SMALL_REQUEST_BYTES
        deltas: list[int] = []
        add, taken, stream_of = deltas.append, in_use.pop, streams.get
        for event in events:
            if event > 0:
                size = sizes[event - 1]
                if not size:
                    add(0)
                    continue
                if streams:
                    small, large = pools[stream_of(event, 0)]
                keys = small if size <= most_small else large
                index = bisect_left(keys, size << bits)
                if index < len(keys):
                    key = keys.pop(index)
                    found, address = key >> bits, key & addresses
                    del starts[address]
                else:
                    found = segment_bytes(size, self.large_segment_bytes)
                    if not self._has_room(found):
                        self.failed_event = event
                        return deltas
                    address = self._new_segment(found)
                    key = ends[address + found] = found << bits | address
                remainder = found - size
                # Small blocks are always split, large ones if more than 1 MiB is left.
                if remainder and (remainder > most_small or size <= most_small):
                    key, start = size << bits | address, address + size
                    rest = remainder << bits | start
                    starts[start] = ends[start + remainder] = rest
                    insort(keys, rest)
                    found = size
                else:
                    del ends[address + found]
                in_use[event] = key
                add(found)
            else:
                key = taken(-event, 0)
                found = key >> bits
                add(-found)
                if not found:  # no block is freed
                    if event == EMPTY_CACHE:
                        self._empty_cache()
                    continue
                if streams:
                    small, large = pools[stream_of(-event, 0)]
                keys = small if found <= most_small else large
                address = key & addresses
                end = address + found
                if address in ends:
                    below = ends.pop(address)
                    address = below & addresses
                    del keys[bisect_left(keys, below)]
                    del starts[address]
                    key = end - address << bits | address
                if end in starts:
                    above = starts.pop(end)
                    del keys[bisect_left(keys, above)]
                    end += above >> bits
                    key = end - address << bits | address
                starts[address] = ends[end] = key
                insort(keys, key)
        return deltas

    def _has_room(self, size_bytes: int) -> bool:
        """Return whether a segment fits, after emptying the cache if need be."""
        if self.reserved_bytes + size_bytes > self.total_bytes:
            self.retries += 1
            self._empty_cache()
        return self.reserved_bytes + size_bytes <= self.total_bytes

    def _new_segment(self, size_bytes: int) -> int:
        """Allocate a segment on the device (``cudaMalloc``) and return its address."""
        address = self._addresses.take(size_bytes)
        self._segments[address] = size_bytes
        self.reserved_bytes += size_bytes
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self.reserved_bytes)
        return address

    def _empty_cache(self) -> None:
        """Release wholly free segments to the device (``cudaFree``)."""
        for keys in chain.from_iterable(self._pools.values()):
            left = []
            for key in keys:
                size, address = key >> _ADDRESS_BITS, key & _ADDRESSES
                if self._segments.get(address) == size:
                    del self._segments[address]
                    del self._starts[address], self._ends[address + size]
                    self.reserved_bytes -= size
                else:
                    left.append(key)
            keys[:] = left


def _copied(state: AllocatorState) -> AllocatorState:
    copies = {
        name: value.copy() if isinstance(value, (dict, SegmentAddresses)) else value
        for name, value in state.items()
    }
    copies["_pools"] = {
        stream: (small.copy(), large.copy())
        for stream, (small, large) in state["_pools"].items()
    }
    return copies
