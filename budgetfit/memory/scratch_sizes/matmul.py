"""Workspaces of matrix products: cuBLAS, cuBLASLt and grouped GEMMs."""

from budgetfit.memory.scratch_sizes.rules import DeviceProperties, rule

SMALL_WORKSPACE_BYTES = 8_519_680  # :4096:2:16:8 in KiB
LARGE_WORKSPACE_BYTES = 33_554_432
CUBLASLT_WORKSPACE_BYTES = 1 << 20  # on every GPU

GROUP_BYTES = 60
GROUP_PADDING_BYTES = 24  # arrays of 8 bytes a group are aligned to 16
GROUP_WORKSPACE_BYTES = 512  # of each SM
BLACKWELL = 10  # compute capability of its data-center GPUs
BLACKWELL_WORKSPACE_BYTES = (5888, 5376)  # of each SM; for few rows or columns
SMALL_GROUP_SIDE = 128


def cublas_workspace_is_persistent(torch_version: tuple[int, int]) -> bool:
    """Return whether a cuBLAS workspace lives as long as its thread."""
    return torch_version <= (2, 14)


def cublaslt_workspace_is_separate(torch_version: tuple[int, int]) -> bool:
    """Return whether cuBLASLt has a workspace besides that of cuBLAS."""
    # A persistent one in 2.11, one per product from 2.15 on; in between they share one.
    return torch_version <= (2, 11) or torch_version >= (2, 15)


@rule(parts=1)
def cublas_workspace(device: DeviceProperties, *torch_version: int) -> list[int]:
    """Return the bytes of one cuBLAS workspace of a torch version (major, minor)."""
    # Up to torch 2.14 each thread with a cuBLAS handle keeps one per stream: the
    # forward thread and the autograd thread make two. From 2.15 on every matrix product
    # allocates one and frees it again.
    if torch_version <= (2, 11):  # 2.11.0 as measured
        large = device.compute_capability == (9, 0)
    elif torch_version <= (2, 13):
        large = device.compute_capability[0] in {9, 10, 12}
    else:
        large = device.compute_capability[0] in {9, 10, 11, 12}
    return [LARGE_WORKSPACE_BYTES if large else SMALL_WORKSPACE_BYTES]


@rule(parts=1)
def cublaslt_workspace(_: DeviceProperties) -> list[int]:
    """Return one separate cuBLASLt workspace."""
    return [CUBLASLT_WORKSPACE_BYTES]


@rule(parts=2)
def grouped_matmul(device: DeviceProperties, *arguments: int) -> list[int]:
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
