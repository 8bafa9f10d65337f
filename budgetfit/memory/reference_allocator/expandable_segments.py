"""Expandable segments: virtual address ranges that are mapped page by page.

Source: ``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block`` and
``unmap_block`` in ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.13. Sizes
and addresses are in bytes.

A range is far larger than its memory will ever be. It begins on a page boundary, and so
do its unmapped blocks, which are whole pages.
"""

from budgetfit.memory.reference_allocator.block_pool import (
    FREE,
    IN_USE,
    UNMAPPED,
    Block,
    BlockPool,
    split,
)


def least_expandable(pool: BlockPool, index: int) -> int:
    """Return the index of the free block to allocate, searching from ``index`` on."""
    # A block before unmapped addresses counts with the size that it could grow to, so
    # that it is kept for requests that no other block can serve.
    keys, blocks = pool.keys, pool.blocks
    reach = _reach_bytes(blocks[keys[index]])
    for following in range(index + 1, len(keys)):
        next_reach = _reach_bytes(blocks[keys[following]])
        if next_reach >= reach:
            break
        index, reach = following, next_reach
    return index


def _reach_bytes(block: Block) -> int:
    above = block.above
    if above is not None and above.state == UNMAPPED:
        return block.size_bytes + above.size_bytes
    return block.size_bytes


def map_block(
    pool: BlockPool, size_bytes: int, *, available_bytes: int, range_bytes: int
) -> tuple[Block | None, int]:
    """Return a block of at least ``size_bytes``, and the bytes mapped for it.

    The block is in no pool. It is ``None`` if the device's ``available_bytes`` do not
    suffice; what was mapped by then stays mapped. ``range_bytes`` is the length of a
    new address range, should none have space.
    """
    block = _lowest_run(pool, size_bytes) or _new_range(pool, range_bytes)
    mapped_bytes = 0
    while block.state == UNMAPPED or block.size_bytes < size_bytes:
        missing_bytes = size_bytes
        if block.state == FREE:
            missing_bytes -= block.size_bytes
            # Free neighbours are merged: what follows in a run is unmapped.
            assert block.above is not None  # noqa: S101 - the run was long enough
            block = block.above
        pages_bytes = _pages_bytes(pool, min(missing_bytes, block.size_bytes))
        if mapped_bytes + pages_bytes > available_bytes:
            return None, mapped_bytes
        mapped_bytes += pages_bytes
        _map_pages(block, pages_bytes)
    pool.remove(block)
    return block, mapped_bytes


def _lowest_run(pool: BlockPool, size_bytes: int) -> Block | None:
    """Return the first of the lowest free and unmapped neighbours that suffice."""
    for unmapped in pool.unmapped:
        first = unmapped
        if unmapped.below is not None and unmapped.below.state == FREE:
            first = unmapped.below
        run_bytes = 0
        block: Block | None = first
        while block is not None and block.state != IN_USE:
            run_bytes += block.size_bytes
            if run_bytes >= size_bytes:
                return first
            block = block.above
    return None


def _new_range(pool: BlockPool, range_bytes: int) -> Block:
    block = Block(_pages_bytes(pool, range_bytes), pool.next_address, pool, UNMAPPED)
    pool.next_address += block.size_bytes
    pool.add_unmapped(block)
    return block


def _pages_bytes(pool: BlockPool, size_bytes: int) -> int:
    page_bytes = pool.page_bytes
    return -(-size_bytes // page_bytes) * page_bytes


def _map_pages(block: Block, pages_bytes: int) -> None:
    """Map the low end of an unmapped block, which becomes a free block."""
    pool = block.pool
    pool.unmapped.remove(block)
    if pages_bytes < block.size_bytes:
        remainder = split(block, pages_bytes)
        block.state = FREE
        pool.add_unmapped(remainder)
    pool.add(block)


def unmap_block(block: Block) -> int:
    """Unmap the whole pages inside a free block; return their bytes."""
    pool = block.pool
    end = block.address + block.size_bytes
    pages_start = _pages_bytes(pool, block.address)
    pages_end = end // pool.page_bytes * pool.page_bytes
    if pages_start >= pages_end:
        return 0
    pool.remove(block)
    pages = block
    if pages_start > block.address:
        pages = split(block, pages_start - block.address)
    pages.state = UNMAPPED  # set before its neighbours are added: they must not merge
    if pages is not block:
        pool.add(block)
    if pages_end < end:
        pool.add(split(pages, pages_end - pages_start))
    pool.add_unmapped(pages)
    if pages.below is None and pages.above is None:
        pool.unmapped.remove(pages)  # nothing of the range is mapped: release it
    return pages_end - pages_start
