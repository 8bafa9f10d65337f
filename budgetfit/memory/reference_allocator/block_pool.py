"""Blocks of device memory, and pools of free blocks in best-fit order.

Source: ``Block`` and ``BlockPool`` in ``c10/cuda/CUDACachingAllocator.cpp`` of
PyTorch 2.13. Sizes and addresses are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import Final

FREE: Final = 0
IN_USE: Final = 1
UNMAPPED: Final = 2  # reserved addresses, in expandable segments only

# The sort key of a free block is its size, then its address, in one int: ints
# compare faster than tuples.
ADDRESS_BITS: Final = 64

_by_address = attrgetter("address")


class Block:
    """A block of one segment: allocated, free or unmapped.

    ``size_bytes`` of an allocated block is the rounded request and a remainder that was
    too small to split off. The other fields are internal.
    """

    __slots__ = (
        *("above", "address", "below", "cached_at"),
        *("pool", "size_bytes", "state"),
    )

    def __init__(
        self, size_bytes: int, address: int, pool: BlockPool, state: int
    ) -> None:
        self.size_bytes = size_bytes
        self.address = address
        self.pool = pool
        self.state = state
        self.cached_at = 0
        self.below: Block | None = None  # the neighbours in the same segment
        self.above: Block | None = None


class BlockPool:
    """Pool of free blocks for small, or for large, requests on one stream.

    PyTorch keeps the free blocks of all streams in one set, sorted by stream first. No
    search crosses streams, so a pool for each stream is equivalent.
    """

    __slots__ = (
        "blocks",
        "keys",
        "least_remainder_bytes",
        "next_address",
        "page_bytes",
        "unmapped",
    )

    def __init__(self, page_bytes: int, least_remainder_bytes: int) -> None:
        self.page_bytes = page_bytes  # granularity of expandable segments
        # Smaller remainders are not split off.
        self.least_remainder_bytes = least_remainder_bytes
        self.keys: list[int] = []  # of the free blocks, ascending
        self.blocks: dict[int, Block] = {}  # the free blocks by key
        self.unmapped: list[Block] = []  # by address
        # Only the order of addresses matters: it decides between equal sizes.
        self.next_address = 0

    def add(self, block: Block) -> None:
        """Add a free block, merged with free neighbours."""
        neighbour = block.below
        if neighbour is not None and neighbour.state == FREE:
            self.remove(neighbour)
            _absorb_below(block, neighbour)
        neighbour = block.above
        if neighbour is not None and neighbour.state == FREE:
            self.remove(neighbour)
            _absorb_above(block, neighbour)
        block.state = FREE
        key = block.size_bytes << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Remove this free block."""
        key = block.size_bytes << ADDRESS_BITS | block.address
        del self.blocks[key]
        del self.keys[bisect_left(self.keys, key)]

    def add_unmapped(self, block: Block) -> None:
        """Add an unmapped block, merged with unmapped neighbours."""
        neighbour = block.below
        if neighbour is not None and neighbour.state == UNMAPPED:
            self.unmapped.remove(neighbour)
            _absorb_below(block, neighbour)
        neighbour = block.above
        if neighbour is not None and neighbour.state == UNMAPPED:
            self.unmapped.remove(neighbour)
            _absorb_above(block, neighbour)
        block.state = UNMAPPED
        insort(self.unmapped, block, key=_by_address)


def split(block: Block, size_bytes: int) -> Block:
    """Shorten a block that is in no pool; return the remainder, in the same state."""
    remainder = Block(
        block.size_bytes - size_bytes,
        block.address + size_bytes,
        block.pool,
        block.state,
    )
    remainder.below = block
    remainder.above = above = block.above
    if above is not None:
        above.below = remainder
    block.above = remainder
    block.size_bytes = size_bytes
    return remainder


def _absorb_below(block: Block, below: Block) -> None:
    block.address = below.address
    block.size_bytes += below.size_bytes
    block.below = far = below.below
    if far is not None:
        far.above = block


def _absorb_above(block: Block, above: Block) -> None:
    block.size_bytes += above.size_bytes
    block.above = far = above.above
    if far is not None:
        far.below = block
