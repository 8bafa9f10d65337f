"""Scratch memory of layer, RMS and batch normalization."""

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
def norm_backward(device: DeviceProperties, *arguments: int) -> list[int]:
    """Return [dgamma blocks, dbeta blocks, their sum, staging buffer, semaphores].

    The weight gradients of many short rows are summed in two passes. Arguments: rows,
    columns, bytes per element, 1 where gamma needs a gradient, 1 where beta does.
    Source: ``LaunchGammaBetaBackwardCUDAKernel`` in ``layer_norm_kernel.cu``.
    """
    rows, columns, element, gamma, beta = arguments
    if rows <= MANY_ROWS or columns // 32 >= device.sm_count // 2 or not gamma:
        return [0, 0, 0, 0, 0]
    height = min(ceil_div(rows, 32), MAX_BLOCKS // ceil_div(columns, 32))
    blocks = height * columns * element
    numbers = ReductionDtypes(
        element, SINGLE_BYTES, 16 // element, private_accumulator=element < SINGLE_BYTES
    )
    _, *buffers = reduce_rows(device, height, columns, numbers)
    return [blocks * gamma, blocks * beta, columns * element, *buffers]


@rule(parts=2)
def batch_norm_statistics(
    _: DeviceProperties, rows: int, channels: int, numbers: int
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
