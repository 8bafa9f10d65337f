"""Scratch memory of reductions: sum, mean, norms, min and max, variance, any and all.

The size depends on the accumulation dtype and the vectorisation: sources are the
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
    register_scratch,
    scratch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
SINGLE_BYTES = 4
PAIR_BYTES = 16  # a value and its index, aligned
WELFORD_BYTES = 16  # mean, sum of squares and counts in fp32; twice that in fp64

Dims = int | list[int] | None


class InputLayout(NamedTuple):
    """Layout of a reduction's input; a new tensor would be recorded by the trace."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> InputLayout:
        """Return a tensor's layout."""
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    @classmethod
    def cast(cls, tensor: Tensor, dtype: torch.dtype) -> InputLayout:
        """Return the layout of ``tensor.to(dtype)``: strides keep their order."""
        stride = compute_elementwise_output_strides(tensor)
        return cls(dtype, tuple(tensor.shape), tuple(stride), 0)

    @classmethod
    def contiguous(cls, dtype: torch.dtype, shape: Sequence[int]) -> InputLayout:
        """Return the layout of a new tensor."""
        stride, step = [0] * len(shape), 1
        for dim in reversed(range(len(shape))):
            stride[dim] = step
            step *= max(shape[dim], 1)
        return cls(dtype, tuple(shape), tuple(stride), 0)


def reduction(
    data: InputLayout,
    dims: Dims,
    *,
    accumulate_bytes: int = 0,
    input_vector: int = 4,
    out_dtype: torch.dtype,
) -> Scratch:
    """Return the scratch memory of reducing ``data`` over ``dims`` (None or []: all).

    ``accumulate_bytes``: size of an accumulator; 0: as in sums, fp32 for 16-bit dtypes,
    else the dtype itself.
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


def input_vec_size(dtype: torch.dtype) -> int:
    """Return ``input_vec_size`` of the sum kernels."""
    return 8 if dtype in HALVES else 4


@register_scratch(
    "sum.default",
    "sum.dim_IntList",
    "mean.default",
    "mean.dim",
    "prod.default",
    "prod.dim_int",
    "nansum.default",
)
def sums(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Sums, means, products; an input of another dtype than the output's is cast."""
    tensor, dims = args[0], args[1] if len(args) > 1 else None
    data = InputLayout.of(tensor)
    widens = tensor.dtype in HALVES and out.dtype == torch.float32
    if tensor.dtype != out.dtype and not widens:
        yield copy_of(tensor, out.element_size())
        data = InputLayout.cast(tensor, out.dtype)
    yield reduction(
        data, dims, input_vector=input_vec_size(data.dtype), out_dtype=out.dtype
    )


@register_scratch("amax", "amin")
def amax_amin(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Minimum or maximum over dimensions, compared in their own dtype."""
    yield _comparison(
        InputLayout.of(args[0]), args[1] if len(args) > 1 else None, out.dtype
    )


@register_scratch("max.default", "min.default")
def max_min(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Minimum or maximum of all elements, which are made contiguous."""
    data = InputLayout.of(args[0])
    if not args[0].is_contiguous():
        yield copy_of(args[0])
        data = InputLayout.contiguous(data.dtype, data.shape)
    yield _comparison(data, None, out.dtype)


def _comparison(data: InputLayout, dims: Dims, dtype: torch.dtype) -> Scratch:
    return reduction(data, dims, accumulate_bytes=data.dtype.itemsize, out_dtype=dtype)


@register_scratch("max.dim", "min.dim")
def max_min_dim(args: Args, _kwargs: Kwargs, out: Args) -> Iterator[Scratch]:
    """Minimum or maximum with indices."""
    yield reduction(
        InputLayout.of(args[0]),
        args[1],
        accumulate_bytes=PAIR_BYTES,
        out_dtype=out[0].dtype,
    )


@register_scratch("argmax", "argmin")
def argmax_argmin(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Indices of minimum or maximum; without a dimension, of the flattened tensor."""
    tensor, dim = args[0], args[1] if len(args) > 1 else None
    data = InputLayout.of(tensor)
    if dim is None and not flattens(tensor):
        yield copy_of(tensor)
        data = InputLayout.contiguous(data.dtype, [tensor.numel()])
    yield reduction(data, dim, accumulate_bytes=PAIR_BYTES, out_dtype=out.dtype)


@register_scratch("any", "all")
def any_all(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Whether any or all are true."""
    tensor, dims = args[0], args[1] if len(args) > 1 else None
    if tensor.numel() == 1 and tensor.dtype != torch.bool:
        yield buffer(1)
    yield reduction(
        InputLayout.of(tensor), dims, accumulate_bytes=1, out_dtype=out.dtype
    )


@register_scratch("var.correction", "std.correction", "var_mean.correction", "std_mean")
def var_std(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Welford's algorithm: two inputs per load."""
    tensor, dims = args[0], args[1] if len(args) > 1 else None
    double = 2 if tensor.dtype == torch.float64 else 1
    yield reduction(
        InputLayout.of(tensor),
        dims,
        accumulate_bytes=WELFORD_BYTES * double,
        input_vector=2,
        out_dtype=tensor.dtype,
    )


@register_scratch("linalg_vector_norm")
def vector_norm(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Norms of any order."""
    tensor, dims = args[0], args[2] if len(args) > 2 else None  # noqa: PLR2004 - the third argument
    yield reduction(
        InputLayout.of(tensor),
        dims,
        input_vector=input_vec_size(tensor.dtype),
        out_dtype=out.dtype,
    )


@register_scratch("logsumexp")
def logsumexp(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """The maximum, and the shifted exponentials, which are summed."""
    tensor, dims = args[0], args[1]
    yield buffer(out.numel() * out.element_size())
    yield copy_of(tensor, out.element_size())
    yield reduction(
        InputLayout.cast(tensor, out.dtype),
        dims,
        input_vector=input_vec_size(out.dtype),
        out_dtype=out.dtype,
    )
