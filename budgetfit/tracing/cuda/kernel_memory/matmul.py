"""Scratch memory of matrix products: copies for cuBLAS, grouped GEMM workspaces.

cuBLAS gets a copy of a matrix with stride 1 in neither dimension. Sources:
``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas`` in
``aten/src/ATen/native/cuda/Blas.cpp``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Kwargs,
    Scratch,
    copy_of,
    register_scratch,
    scratch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def readable(matrix: Tensor) -> bool:
    """Return whether cuBLAS reads a matrix, or a batch of them, without a copy."""
    rows, columns = matrix.shape[-2:]
    row_step, column_step = matrix.stride()[-2:]
    if row_step == 1 and column_step >= max(1, rows):
        return True
    if column_step == 1 and row_step >= max(1, columns):
        return True
    return bool(matrix.is_contiguous())


@register_scratch("mm", "bmm")
def product(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Copies for cuBLAS; a batch of outer products does not use it."""
    if out.dim() > 2 and args[0].shape[-1] == 1:  # noqa: PLR2004 - more than a matrix
        return
    yield from (copy_of(matrix) for matrix in args[:2] if not readable(matrix))


@register_scratch("addmm", "baddbmm", "addbmm")
def product_and_sum(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Copies for cuBLAS; the summand is copied into the output."""
    yield from (copy_of(matrix) for matrix in args[1:3] if not readable(matrix))


@register_scratch("_grouped_mm")
def grouped_product(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Workspace of the bf16 kernels of Hopper and Blackwell."""
    offsets = args[2] if len(args) > 2 else None  # noqa: PLR2004 - the third argument
    if out.dtype == torch.bfloat16:
        groups = out.shape[0] if offsets is None else offsets.numel()
        left, right = args[0].dim() - 2, args[1].dim() - 2
        rows, columns = (groups if right > left else 1), (groups if left > right else 1)
        yield scratch(
            "grouped_matmul", groups, out.shape[-2], rows, out.shape[-1], columns
        )
