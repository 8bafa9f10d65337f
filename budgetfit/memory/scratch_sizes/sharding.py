"""Scratch memory of the copies around FSDP2's collectives.

Source: ``aten/src/ATen/native/cuda/TensorShape.cu`` of torch 2.13.
"""

from math import ceil, sqrt

from budgetfit.memory.scratch_sizes.rules import DeviceProperties, ceil_div, rule

INDEX_BYTES = 8
BLOCK_THREADS = 128
BLOCK_BYTES = BLOCK_THREADS * 16


@rule(parts=1)
def split_with_sizes_copy(
    device: DeviceProperties, chunks: int, *part_bytes: int
) -> list[int]:
    """Addresses, sizes and blocks of the parts of an all-gather's output."""
    # A block takes several tiles where there are more than the GPU runs twice over.
    blocks = sum(ceil_div(size, BLOCK_BYTES) for size in part_bytes)
    most_blocks = device.sm_count * device.threads_per_sm * 2 // BLOCK_THREADS
    factor = ceil_div(blocks * chunks, most_blocks)
    chunks_per_block = max(1, min(ceil(sqrt(factor)), chunks))
    tile = BLOCK_BYTES * max(1, ceil_div(factor, chunks_per_block))
    numbers = 4 * len(part_bytes) + 1 + sum(ceil_div(size, tile) for size in part_bytes)
    return [INDEX_BYTES * numbers]


@rule(parts=1)
def chunk_cat(_: DeviceProperties, *chunk_bytes: int) -> list[int]:
    """Addresses, sizes and blocks of the chunks of gradients."""
    blocks = sum(ceil_div(size, BLOCK_BYTES) for size in chunk_bytes)
    return [INDEX_BYTES * (6 * len(chunk_bytes) + 2 + blocks)]
