"""Scratch memory of CUDA kernels (``scratch_bytes``) and cuBLAS workspaces.

Importing this module registers the rules of this folder. A ``StepTrace`` holds a rule's
name and arguments; the replay calls ``scratch_bytes``. Each rule cites its source; all
are compared byte for byte with PyTorch's host code in ``tests/accuracy/op_level``.
"""

from __future__ import annotations

import re

from budgetfit.memory.scratch_sizes import attention, indexing, reductions
from budgetfit.memory.scratch_sizes.reductions import ReductionDtypes, reduce_rows
from budgetfit.memory.scratch_sizes.rules import (
    PARTS,
    RULES,
    DeviceProperties,
    ceil_div,
    rule,
)

__all__ = [
    "PARTS",
    "RULES",
    "DeviceProperties",
    "attention",
    "cublas_workspace_bytes",
    "cublas_workspace_is_persistent",
    "cublaslt_workspace_is_separate",
    "indexing",
    "reductions",
    "rule",
    "scratch_bytes",
]

SMALL_WORKSPACE_BYTES = 8_519_680  # :4096:2:16:8 in KiB
LARGE_WORKSPACE_BYTES = 33_554_432
CUBLASLT_WORKSPACE_BYTES = 1 << 20  # on every GPU

SINGLE_BYTES = 4  # of fp32
MANY_ROWS = 64 * 1024  # above, the weight gradients of a norm are summed in two passes
GROUP_BYTES = 60
GROUP_PADDING_BYTES = 24  # arrays of 8 bytes a group are aligned to 16
GROUP_WORKSPACE_BYTES = 512  # of each SM
BLACKWELL = 10  # compute capability of its data-center GPUs
BLACKWELL_WORKSPACE_BYTES = (5888, 5376)  # of each SM; for few rows or columns
SMALL_GROUP_SIDE = 128
MAX_BLOCKS = 32 * 1024  # of the first pass
NORM_WARP = 32  # channels, of batch normalization
NORM_THREADS = 512  # of a block
NORM_ROWS_PER_THREAD = 16
NORM_MAX_BLOCKS = 128  # that share a channel
NORM_MIN_BLOCKS = 8  # fewer are not worth it


def scratch_bytes(
    device: DeviceProperties, rule_name: str, arguments: tuple[int, ...]
) -> list[int]:
    """Return the scratch requests of a kernel call in bytes, unrounded, in order.

    The number of parts depends on the rule only; a part that is not allocated is 0.

    Raises:
        KeyError: There is no such rule.
    """
    sizes = RULES[rule_name](device, arguments)
    assert len(sizes) == PARTS[rule_name], rule_name  # noqa: S101 - invariant
    return sizes


def cublas_workspace_bytes(device: DeviceProperties, torch_version: str) -> int:
    """Return the bytes of one cuBLAS workspace.

    Up to torch 2.14 each thread with a cuBLAS handle keeps one per stream: the forward
    thread and the autograd thread make two. From 2.15 on every matrix product allocates
    one and frees it again.
    """
    major, minor = device.compute_capability
    version = _version(torch_version)
    if version <= (2, 11):  # 2.11.0 as measured
        large = (major, minor) == (9, 0)
    elif version <= (2, 13):
        large = major in {9, 10, 12}
    else:
        large = major in {9, 10, 11, 12}
    return LARGE_WORKSPACE_BYTES if large else SMALL_WORKSPACE_BYTES


def cublas_workspace_is_persistent(torch_version: str) -> bool:
    """Return whether a cuBLAS workspace lives as long as its thread."""
    return _version(torch_version) <= (2, 14)


def cublaslt_workspace_is_separate(torch_version: str) -> bool:
    """Return whether cuBLASLt has a workspace besides that of cuBLAS.

    A persistent one in 2.11, one per product from 2.15 on; in between they share one.
    """
    version = _version(torch_version)
    return version <= (2, 11) or version >= (2, 15)


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"not a torch version: {text!r}; like '2.13.0+cu130'")
    return int(match[1]), int(match[2])


@rule("buffer", parts=1)
def buffer(_device: DeviceProperties, arguments: tuple[int, ...]) -> list[int]:
    """Return the first argument: the bytes of a temporary tensor."""
    return [arguments[0]]


@rule("norm_backward", parts=5)
def norm_backward(device: DeviceProperties, arguments: tuple[int, ...]) -> list[int]:
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


@rule("batch_norm_statistics", parts=2)
def batch_norm_statistics(
    _device: DeviceProperties, arguments: tuple[int, ...]
) -> list[int]:
    """Return [staging buffer, semaphores] of channels-last batch norm statistics.

    Arguments: rows, channels, numbers that each thread block passes on. Source:
    ``flexible_launch_configs`` in ``Normalization.cuh``.
    """
    rows, channels, numbers = arguments
    width = min(last_power_of_two(channels), NORM_WARP)
    height = min(
        last_power_of_two(ceil_div(rows, NORM_ROWS_PER_THREAD)), NORM_THREADS // width
    )
    if width * height != NORM_THREADS:
        width = min(last_power_of_two(channels), NORM_THREADS // height)
    blocks = min(ceil_div(rows, height * NORM_ROWS_PER_THREAD), NORM_MAX_BLOCKS)
    if blocks < NORM_MIN_BLOCKS:
        return [0, 0]
    return [numbers * channels * blocks * SINGLE_BYTES, ceil_div(channels, width) * 4]


def last_power_of_two(number: int) -> int:
    """Return the largest power of two that is not above ``number``."""
    return 1 << (max(number, 1).bit_length() - 1)


@rule("grouped_matmul", parts=2)
def grouped_matmul(device: DeviceProperties, arguments: tuple[int, ...]) -> list[int]:
    """Return [problem descriptions, workspace] of a bf16 grouped GEMM (CUTLASS).

    Arguments: groups, rows, groups that share them, columns, groups that share those.
    Source: ``GroupMM.cu``. Hopper and Blackwell data-center GPUs have this kernel,
    others multiply one group after the other.
    """
    groups, rows, row_groups, columns, column_groups = arguments
    if device.compute_capability == (9, 0):
        workspace_bytes = GROUP_WORKSPACE_BYTES
    elif device.compute_capability[0] == BLACKWELL:
        side = min(rows // row_groups, columns // column_groups)
        small = side <= SMALL_GROUP_SIDE
        workspace_bytes = BLACKWELL_WORKSPACE_BYTES[small]
    else:
        return [0, 0]
    descriptions = groups * GROUP_BYTES + groups % 2 * GROUP_PADDING_BYTES
    return [descriptions, device.sm_count * workspace_bytes]


@rule("cublas_workspace", parts=1)
def cublas_workspace(device: DeviceProperties, arguments: tuple[int, ...]) -> list[int]:
    """Return one cuBLAS workspace of torch version ``arguments`` = (major, minor)."""
    major, minor = arguments
    return [cublas_workspace_bytes(device, f"{major}.{minor}")]


@rule("cublaslt_workspace", parts=1)
def cublaslt_workspace(
    _device: DeviceProperties, _arguments: tuple[int, ...]
) -> list[int]:
    """Return one separate cuBLASLt workspace."""
    return [CUBLASLT_WORKSPACE_BYTES]
