"""Scratch of the reductions: sum, mean, norms, extrema, variance, any and all.

Which dtype a kernel accumulates in, and how it reads, decide the size: sources are the
``Reduce*Kernel.cu`` files of ``aten/src/ATen/native/cuda`` and ``make_reduction`` in
``ReduceOpsUtils.h`` (which copies the input where the dtype must change first).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._prims_common import compute_elementwise_output_strides

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Kwargs,
    Scratch,
    buffer,
    copy_of,
    flattens,
    scratch,
    temporary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
SINGLE_BYTES = 4
PAIR_BYTES = 16  # a value and its index, aligned
WELFORD_BYTES = 16  # mean, sum of squares and counts in fp32; twice that in fp64

Dims = int | list[int] | None


class Input(NamedTuple):
    """What a reduction reads. Rules make no tensors: the trace would see them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Input:
        """Return a tensor's layout."""
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    @classmethod
    def cast(cls, tensor: Tensor, dtype: torch.dtype) -> Input:
        """Return the layout of ``tensor.to(dtype)``: strides keep their order."""
        stride = compute_elementwise_output_strides(tensor)
        return cls(dtype, tuple(tensor.shape), tuple(stride), 0)

    @classmethod
    def contiguous(cls, dtype: torch.dtype, shape: Sequence[int]) -> Input:
        """Return the layout of a new tensor."""
        stride, step = [0] * len(shape), 1
        for dim in reversed(range(len(shape))):
            stride[dim] = step
            step *= max(shape[dim], 1)
        return cls(dtype, tuple(shape), tuple(stride), 0)


def reduction(
    data: Input,
    dims: Dims,
    *,
    accumulate_bytes: int = 0,
    input_vector: int = 4,
    out_dtype: torch.dtype,
) -> Scratch:
    """Return the scratch of reducing ``data`` over ``dims`` (None or []: all).

    ``accumulate_bytes``: of the numbers that threads exchange; 0: as sums do, fp32 for
    16 bits and the dtype itself for all else.
    """
    if not accumulate_bytes:
        half = data.dtype in HALVES
        accumulate_bytes = SINGLE_BYTES if half else data.dtype.itemsize
    ndim = len(data.shape)
    every = dims is None or dims == []
    chosen = range(ndim) if every else [dims] if isinstance(dims, int) else dims
    mask = sum(1 << d for d in {d % max(ndim, 1) for d in chosen or ()})
    return scratch(
        "reduction",
        data.dtype.itemsize,
        accumulate_bytes,
        input_vector,
        accumulate_bytes > out_dtype.itemsize,
        mask,
        data.offset,
        *data.shape,
        *data.stride,
    )


def vector(dtype: torch.dtype) -> int:
    """Return how many inputs the kernels of sums load at once."""
    return 8 if dtype in HALVES else 4


@temporary(
    "sum.default",
    "sum.dim_IntList",
    "mean.default",
    "mean.dim",
    "prod.default",
    "prod.dim_int",
    "nansum.default",
)
def sums(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Sums, means, products; another output dtype makes a copy of the input first."""
    tensor, dims = args[0], args[1] if len(args) > 1 else None
    data = Input.of(tensor)
    widens = tensor.dtype in HALVES and out.dtype == torch.float32
    if tensor.dtype != out.dtype and not widens:
        yield copy_of(tensor, out.element_size())
        data = Input.cast(tensor, out.dtype)
    yield reduction(data, dims, input_vector=vector(data.dtype), out_dtype=out.dtype)


@temporary("amax", "amin")
def extreme_values(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Extrema over dimensions, compared in their own dtype."""
    yield _comparison(Input.of(args[0]), args[1] if len(args) > 1 else None, out.dtype)


@temporary("max.default", "min.default")
def extremes(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Extrema of everything, which must be contiguous."""
    data = Input.of(args[0])
    if not args[0].is_contiguous():
        yield copy_of(args[0])
        data = Input.contiguous(data.dtype, data.shape)
    yield _comparison(data, None, out.dtype)


def _comparison(data: Input, dims: Dims, dtype: torch.dtype) -> Scratch:
    return reduction(data, dims, accumulate_bytes=data.dtype.itemsize, out_dtype=dtype)


@temporary("max.dim", "min.dim")
def extremes_and_places(args: Args, _kwargs: Kwargs, out: Args) -> Iterator[Scratch]:
    """Extrema with their indices."""
    yield reduction(
        Input.of(args[0]), args[1], accumulate_bytes=PAIR_BYTES, out_dtype=out[0].dtype
    )


@temporary("argmax", "argmin")
def places(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Indices of extrema; without a dimension, of the flattened tensor."""
    tensor, dim = args[0], args[1] if len(args) > 1 else None
    data = Input.of(tensor)
    if dim is None and not flattens(tensor):
        yield copy_of(tensor)
        data = Input.contiguous(data.dtype, [tensor.numel()])
    yield reduction(data, dim, accumulate_bytes=PAIR_BYTES, out_dtype=out.dtype)


@temporary("any", "all")
def truths(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Whether any or all are true."""
    tensor, dims = args[0], args[1] if len(args) > 1 else None
    if tensor.numel() == 1 and tensor.dtype != torch.bool:
        yield buffer(1)
    yield reduction(Input.of(tensor), dims, accumulate_bytes=1, out_dtype=out.dtype)


@temporary("var.correction", "std.correction", "var_mean.correction", "std_mean")
def variances(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Welford's algorithm: two inputs a load."""
    tensor, dims = args[0], args[1] if len(args) > 1 else None
    double = 2 if tensor.dtype == torch.float64 else 1
    yield reduction(
        Input.of(tensor),
        dims,
        accumulate_bytes=WELFORD_BYTES * double,
        input_vector=2,
        out_dtype=tensor.dtype,
    )


@temporary("linalg_vector_norm")
def vector_norms(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Norms of any order."""
    tensor, dims = args[0], args[2] if len(args) > 2 else None  # noqa: PLR2004 - the third argument
    yield reduction(
        Input.of(tensor), dims, input_vector=vector(tensor.dtype), out_dtype=out.dtype
    )


@temporary("logsumexp")
def log_sums(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """The largest value is taken out first: a copy of the input's size, summed."""
    tensor, dims = args[0], args[1]
    yield buffer(out.numel() * out.element_size())
    yield copy_of(tensor, out.element_size())
    yield reduction(
        Input.cast(tensor, out.dtype),
        dims,
        input_vector=vector(out.dtype),
        out_dtype=out.dtype,
    )
