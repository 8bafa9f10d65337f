"""Scratch of matrix products and of convolutions without cuDNN.

cuBLAS cannot read a matrix that has no neighbouring elements; it gets a copy. Sources:
``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas`` in
``aten/src/ATen/native/cuda/Blas.cpp``, ``ConvolutionMM2d.cu``. cuDNN's workspaces are
known to a card alone (M40) and are not represented.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from budgetfit.tracing.cuda_semantics.scratch_registry import (
    Args,
    Kwargs,
    Scratch,
    buffer,
    contiguous_copies,
    copy_of,
    scratch,
    temporary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def readable(matrix: Tensor) -> bool:
    """Say whether cuBLAS can read a matrix, or a batch of them, as it lies."""
    rows, columns = matrix.shape[-2:]
    row_step, column_step = matrix.stride()[-2:]
    if row_step == 1 and column_step >= max(1, rows):
        return True
    if column_step == 1 and row_step >= max(1, columns):
        return True
    return bool(matrix.is_contiguous())


@temporary("mm", "bmm")
def product(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Copies of what cuBLAS cannot read; a batch of outer products is no product."""
    if out.dim() > 2 and args[0].shape[-1] == 1:  # noqa: PLR2004 - more than a matrix
        return
    yield from (copy_of(matrix) for matrix in args[:2] if not readable(matrix))


@temporary("addmm", "baddbmm", "addbmm")
def product_and_sum(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """The same; the summand is copied into the output."""
    yield from (copy_of(matrix) for matrix in args[1:3] if not readable(matrix))


@temporary("_grouped_mm")
def grouped_product(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """A workspace of the Hopper kernel, in bf16."""
    offsets = args[2] if len(args) > 2 else None  # noqa: PLR2004 - the third argument
    if out.dtype == torch.bfloat16:
        groups = out.shape[0] if offsets is None else offsets.numel()
        yield scratch("grouped_matmul", groups)


def _columns(tensor: Tensor, weight: Tensor, outputs: tuple[int, ...]) -> Scratch:
    """Return one sample's patches, unfolded."""
    patch = prod(weight.shape[1:])
    return buffer(patch * prod(outputs) * tensor.element_size())


def _depthwise(tensor: Tensor, groups: int) -> bool:
    return groups > 1 and groups == tensor.shape[1]


@temporary("convolution")
def convolution(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """The patches of a sample, unless the kernel is a point; depthwise has none."""
    tensor, weight, _, stride, padding, _, transposed, _, groups = args[:9]
    if transposed or (groups > 1 and not _depthwise(tensor, groups)):
        return
    yield from contiguous_copies(tensor, when="before")
    point = prod(weight.shape[2:]) == 1 and max(stride) == 1 and max(padding) == 0
    if groups == 1 and not point:
        yield _columns(tensor, weight, tuple(out.shape[2:]))


@temporary("convolution_backward")
def convolution_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[Scratch]:
    """The same patches. A depthwise one drops the input's copy before its gradient."""
    grad, tensor, weight = args[:3]
    transposed, groups, mask = args[7], args[9], args[10]
    if transposed or (groups > 1 and not _depthwise(tensor, groups)):
        return
    copies = [t for t in (grad, tensor) if not t.is_contiguous()]
    if groups > 1 and mask[0]:
        copies = copies[:1]
    yield from contiguous_copies(*copies, when="before")
    if groups == 1:
        yield _columns(tensor, weight, tuple(grad.shape[2:]))
