"""Scratch memory of layer, RMS and batch normalization."""

from __future__ import annotations

from budgetfit.memory.scratch_sizes.reductions import ReductionDtypes, reduce_rows
from budgetfit.memory.scratch_sizes.rules import (
    DeviceProperties,
    ceil_div,
    last_power_of_two,
    rule,
)

SINGLE_BYTES = 4  # of fp32
MANY_ROWS = 64 * 1024  # above, the weight gradients of a norm are summed in two passes
MAX_BLOCKS = 32 * 1024  # of the first pass
WARP = 32  # channels, of batch normalization
THREADS = 512  # of a block
ROWS_PER_THREAD = 16
MAX_SHARING_BLOCKS = 128  # that share a channel
MIN_SHARING_BLOCKS = 8  # fewer are not worth it


@rule(parts=5)
def norm_backward(
    device: DeviceProperties,
    rows: int,
    columns: int,
    element_bytes: int,
    gamma: int,
    beta: int,
) -> list[int]:
    """Return [dgamma blocks, dbeta blocks, their sum, staging buffer, semaphores].

    The weight gradients of many short rows are summed in two passes; ``gamma`` and
    ``beta`` are 1 where they need a gradient. Source:
    ``LaunchGammaBetaBackwardCUDAKernel`` in ``layer_norm_kernel.cu``.
    """
    if rows <= MANY_ROWS or columns // 32 >= device.sm_count // 2 or not gamma:
        return [0, 0, 0, 0, 0]
    height = min(ceil_div(rows, 32), MAX_BLOCKS // ceil_div(columns, 32))
    blocks = height * columns * element_bytes
    numbers = ReductionDtypes(
        element_bytes,
        SINGLE_BYTES,
        16 // element_bytes,
        private_accumulator=element_bytes < SINGLE_BYTES,
    )
    _, *buffers = reduce_rows(device, height, columns, numbers)
    return [blocks * gamma, blocks * beta, columns * element_bytes, *buffers]


@rule(parts=2)
def batch_norm_statistics(
    _device: DeviceProperties, rows: int, channels: int, numbers: int
) -> list[int]:
    """Return [staging buffer, semaphores] of channels-last batch norm statistics.

    ``numbers``: how many each thread block passes on for a channel. Source:
    ``flexible_launch_configs`` in ``Normalization.cuh``.
    """
    width = min(last_power_of_two(channels), WARP)
    height = min(last_power_of_two(ceil_div(rows, ROWS_PER_THREAD)), THREADS // width)
    if width * height != THREADS:
        width = min(last_power_of_two(channels), THREADS // height)
    blocks = min(ceil_div(rows, height * ROWS_PER_THREAD), MAX_SHARING_BLOCKS)
    if blocks < MIN_SHARING_BLOCKS:
        return [0, 0]
    return [numbers * channels * blocks * SINGLE_BYTES, ceil_div(channels, width) * 4]
