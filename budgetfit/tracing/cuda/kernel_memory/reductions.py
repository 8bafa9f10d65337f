"""Reductions: sum, mean, norms, min and max, variance, any and all.

The size depends on the accumulation dtype and the vectorisation: sources are the
``Reduce*Kernel.cu`` files of ``aten/src/ATen/native/cuda`` and ``make_reduction`` in
``ReduceOpsUtils.h`` (which copies the input where the dtype must change first).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch._prims_common import (
    compute_elementwise_output_strides,
    is_non_overlapping_and_dense_or_false,
    make_contiguous_strides_for,
)

from budgetfit.core.step_trace import KernelScratch
from budgetfit.tracing.cuda.kernel_memory.registry import (
    HALVES,
    INDEX_BYTES,
    OUTPUTS,
    SINGLE_BYTES,
    Call,
    Steps,
    Unverified,
    buffer,
    copy_of,
    flattens,
    freed_at_once,
    kernel_memory,
    scratch,
)
from budgetfit.tracing.records import Output

PAIR_BYTES = 16  # a value and its index, aligned
WELFORD_BYTES = 16  # mean, sum of squares and counts in fp32; twice that in fp64
CHUNK = 65536  # elements that one thread block of a foreach norm reduces


class Layout(NamedTuple):
    """Layout of a reduction's input; a new tensor would be recorded by the trace."""

    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return a tensor's layout."""
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tensor.shape, tensor.stride(), offset)

    @classmethod
    def cast(cls, tensor: Tensor, dtype: torch.dtype) -> Layout:
        """Return the layout of ``tensor.to(dtype)``: strides keep their order."""
        return cls(dtype, tensor.shape, compute_elementwise_output_strides(tensor))

    @classmethod
    def contiguous(cls, dtype: torch.dtype, shape: Sequence[int]) -> Layout:
        """Return the layout of a new tensor."""
        return cls(dtype, shape, make_contiguous_strides_for(tuple(shape)))


def reduction(
    data: Layout | Tensor,
    dims: int | Sequence[int] | None,
    out_dtype: torch.dtype,
    accumulate_bytes: int = 0,
    input_vector: int = 0,
) -> tuple[KernelScratch[int], ...]:
    """Return the scratch memory of reducing ``data`` over ``dims`` (None or []: all).

    ``accumulate_bytes``: size of an accumulator; 0: as in sums, fp32 for 16-bit dtypes,
    else the dtype itself. ``input_vector``: the kernel's ``input_vec_size``; 0: as in
    sums.
    """
    if not isinstance(data, Layout):
        data = Layout.of(data)
    half, element_bytes = data.dtype in HALVES, data.dtype.itemsize
    accumulate_bytes = accumulate_bytes or (SINGLE_BYTES if half else element_bytes)
    ndim = len(data.shape)
    every = dims is None or dims == []
    chosen = range(ndim) if every else [dims] if isinstance(dims, int) else dims
    mask = sum(1 << d for d in {d % max(ndim, 1) for d in chosen or ()})
    return scratch(
        "reduction",
        element_bytes,
        accumulate_bytes,
        input_vector or (8 if half else 4),
        accumulate_bytes > out_dtype.itemsize,
        mask,
        data.offset,
        *data.shape,
        *data.stride,
    )


@kernel_memory(
    "sum.default",
    "sum.dim_IntList",
    "mean.default",
    "mean.dim",
    "prod.default",
    "prod.dim_int",
)
def sums(call: Call) -> Steps:
    """Sums, means, products."""
    yield from _in_dtype_of_output(call, call.get(1))


@kernel_memory("nansum")
def nansum(call: Call) -> Steps:
    """As sums; without dimensions fake tensors do not reduce."""
    if call.get(1) == []:
        yield Unverified()
    yield from _in_dtype_of_output(call, call.get(1))


@kernel_memory("count_nonzero")
def count_nonzero(call: Call) -> Steps:
    """Which are not zero, and their sum as int64."""
    tensor, dims = call.args[0], call.get(1)
    if tensor.dtype != torch.bool:
        yield copy_of(tensor, 1)
    yield OUTPUTS
    yield copy_of(tensor, INDEX_BYTES)
    yield from reduction(Layout.cast(tensor, torch.int64), dims, torch.int64)


@kernel_memory("aminmax")
def aminmax(_call: Call) -> Steps:
    """Both at once: not represented."""
    yield Unverified()


def _in_dtype_of_output(call: Call, dims: int | Sequence[int] | None) -> Steps:
    """Cast an input of another dtype, other than 16 bits to fp32, and reduce it."""
    tensor, dtype = call.args[0], call.out.dtype
    data = Layout.of(tensor)
    widens = tensor.dtype in HALVES and dtype == torch.float32
    if tensor.dtype != dtype and not widens:
        yield copy_of(tensor, dtype.itemsize)
        data = Layout.cast(tensor, dtype)
    yield from reduction(data, dims, dtype)


@kernel_memory("amax", "amin")
def amax_amin(call: Call) -> Steps:
    """Minimum or maximum over dimensions, compared in their own dtype."""
    tensor, dims = call.args[0], call.get(1)
    yield from reduction(tensor, dims, call.out.dtype, tensor.element_size(), 4)


@kernel_memory("max.default", "min.default")
def max_min(call: Call) -> Steps:
    """Minimum or maximum of all elements, which are made contiguous."""
    tensor, data = call.args[0], Layout.of(call.args[0])
    if not tensor.is_contiguous():
        yield copy_of(tensor)
        data = Layout.contiguous(tensor.dtype, tensor.shape)
    yield from reduction(data, None, call.out.dtype, tensor.element_size(), 4)


@kernel_memory("max.dim", "min.dim")
def max_min_dim(call: Call) -> Steps:
    """Minimum or maximum with indices."""
    yield from reduction(call.args[0], call.args[1], call.out[0].dtype, PAIR_BYTES, 4)


@kernel_memory("argmax", "argmin")
def argmax_argmin(call: Call) -> Steps:
    """Indices of minimum or maximum; without a dimension, of the flattened tensor."""
    tensor, dim = call.args[0], call.get(1)
    data = Layout.of(tensor)
    if dim is None and not flattens(tensor):
        yield copy_of(tensor)
        data = Layout.contiguous(data.dtype, [tensor.numel()])
    yield from reduction(data, dim, call.out.dtype, PAIR_BYTES, 4)


@kernel_memory("any", "all")
def any_all(call: Call) -> Steps:
    """Whether any or all are true."""
    tensor, dims = call.args[0], call.get(1)
    if tensor.numel() == 1 and tensor.dtype != torch.bool:
        yield buffer(1)
    if dims != []:
        yield from reduction(tensor, dims, call.out.dtype, 1, 4)


@kernel_memory("var.correction", "std.correction", "var_mean.correction", "std_mean")
def var_std(call: Call) -> Steps:
    """Variance, standard deviation, and the mean with them."""
    tensor = call.args[0]
    yield from welford(Layout.of(tensor), call.get(1), tensor.dtype)


def welford(
    data: Layout, dims: Sequence[int] | None, out_dtype: torch.dtype
) -> tuple[KernelScratch[int], ...]:
    """Return the scratch memory of Welford's algorithm: two inputs per load."""
    welford_bytes = WELFORD_BYTES * (2 if data.dtype == torch.float64 else 1)
    return reduction(data, dims, out_dtype, welford_bytes, 2)


@kernel_memory("linalg_vector_norm", "norm.ScalarOpt_dim")
def vector_norm(call: Call) -> Steps:
    """Norms of any order; that of single elements is their absolute value."""
    tensor, dims, dtype = call.args[0], call.get(2), call.out.dtype
    if not tensor.dim() or all(
        tensor.shape[dim] == 1 for dim in dims or range(tensor.dim())
    ):
        if tensor.dtype != dtype:
            yield copy_of(tensor, dtype.itemsize)
        return
    yield from _in_dtype_of_output(call, dims)


@kernel_memory("dist")
def dist(call: Call) -> Steps:
    """The norm of the difference, a tensor as large as both together."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in call.args[:2]))
    difference = Layout.contiguous(call.out.dtype, shape)
    yield buffer(prod(shape) * call.out.element_size())
    yield OUTPUTS
    yield from reduction(difference, None, call.out.dtype)


@kernel_memory("renorm", "renorm_")
def renorm(call: Call) -> Steps:
    """The norm of each slice, in fp32 for 16 bits, and the factors from it."""
    tensor, _, dim = call.args[:3]
    dtype = tensor.dtype
    real = torch.float32 if dtype in HALVES else dtype.to_real()
    others = [d for d in range(tensor.dim()) if d != dim % tensor.dim()]
    yield OUTPUTS
    yield buffer(tensor.shape[dim] * real.itemsize)
    if not dtype.is_complex:
        yield from freed_at_once(*reduction(tensor, others, real))
    if real != dtype:
        yield buffer(tensor.shape[dim] * dtype.itemsize)


@kernel_memory("_foreach_norm")
def foreach_norm(call: Call) -> Steps:
    """A partial result for each chunk of each tensor; ``ForeachReduceOp.cu``."""
    # Tensors of several dtypes, or with holes, are reduced one after the other.
    tensors = call.args[0]
    dense = map(is_non_overlapping_and_dense_or_false, tensors)
    if len({tensor.dtype for tensor in tensors}) > 1 or not all(dense):
        for position, tensor in enumerate(tensors):  # one after the other
            yield Output(position)
            yield from freed_at_once(*reduction(tensor, None, call.out[position].dtype))
        return
    chunks = max(-(-tensor.numel() // CHUNK) for tensor in tensors)
    yield buffer(len(tensors) * chunks * max(tensors[0].element_size(), SINGLE_BYTES))
    yield OUTPUTS
    if not all(tensor.numel() for tensor in tensors):
        yield buffer(tensors[0].element_size())  # the norm of empty tensors


@kernel_memory("logsumexp")
def logsumexp(call: Call) -> Steps:
    """The maxima, which of them are infinite, and the sum of shifted exponentials."""
    tensor, out, dims = call.args[0], call.out, call.args[1]
    data = Layout.of(tensor)
    if tensor.dtype != out.dtype:  # integers
        yield copy_of(tensor, out.element_size())
        data = Layout.cast(tensor, out.dtype)
    if tensor.numel():
        yield copy_of(out)
        yield from freed_at_once(
            *reduction(data, dims, out.dtype, out.element_size(), 4)
        )
        yield from freed_at_once(copy_of(out), copy_of(out, 1))
    yield copy_of(tensor, out.element_size())
    yield OUTPUTS
    yield from reduction(Layout.cast(tensor, out.dtype), dims, out.dtype)
