"""Embeddings, indexing, sorts and scans.

Sources: ``Embedding.cu``, ``Indexing.cu``, ``Sort.cpp``, ``ScanKernels.cpp`` in
``aten/src/ATen/native/cuda`` and ``TensorAdvancedIndexing.cpp``. Data-dependent ops
(``nonzero``, boolean masks, ``unique``) have no rule.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch._prims_common import check_contiguous_sizes_strides

from budgetfit.tracing.cuda.kernel_memory.registry import (
    INDEX_BYTES,
    OUTPUTS,
    Call,
    Steps,
    Unverified,
    buffer,
    contiguous_copies,
    copy_of,
    flattens,
    freed_at_once,
    kernel_memory,
    scratch,
)
from budgetfit.tracing.records import Free

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LONG_ROW = 1024  # from here on several thread blocks share a row
HALF_BYTES = 2


@kernel_memory("embedding")
def embedding(call: Call) -> Steps:
    """Flattened indices, copied if that needs a copy."""
    if not flattens(call.args[1]):
        yield copy_of(call.args[1])
    yield OUTPUTS


@kernel_memory("embedding_dense_backward")
def embedding_backward(call: Call) -> Steps:
    """More than 3072 indices are sorted and their rows summed in parts.

    Source: ``native/cuda/Embedding.cu`` and ``EmbeddingBackwardKernel.cu``.
    """
    grad, indices, rows = call.args[:3]
    count, index = indices.numel(), indices.element_size()
    [each] = scratch("embedding_indices", count, index)
    segments = scratch("embedding_segments", count, rows, index)
    number = scratch("embedding_count", count, INDEX_BYTES)
    yield from contiguous_copies(grad, indices)
    yield each  # sorted
    yield each  # original position of each
    yield each  # positions
    yield from freed_at_once(*scratch("embedding_sort", count, rows, index))
    yield Free(each)
    yield OUTPUTS
    yield each  # where each segment starts
    yield from number  # of segments
    yield each  # counting
    yield from freed_at_once(*scratch("embedding_unique", count, index))
    yield Free(each)
    yield from segments  # partial sums per segment
    yield from segments  # and offset of each segment
    yield from freed_at_once(*scratch("embedding_scan", count, rows, index))
    yield from number
    columns, element = grad.shape[-1], grad.element_size()
    yield from scratch("embedding_partials", count, rows, columns, index, element)


def _expanded(indices: Sequence[Tensor | None]) -> tuple[torch.Size, int]:
    """Return the broadcast shape of the indices and how many are copied to it.

    The kernel reads all indices with the same strides.
    """
    given = [index for index in indices if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    strides = [_expanded_stride(index, shape) for index in given]
    if len(set(strides)) == 1:
        return shape, 0
    return shape, sum(
        not check_contiguous_sizes_strides(shape, stride) for stride in strides
    )


def _expanded_stride(index: Tensor, shape: torch.Size) -> tuple[int, ...]:
    missing = len(shape) - index.dim()
    return (0,) * missing + tuple(
        0 if size == 1 and whole != 1 else stride
        for size, stride, whole in zip(
            index.shape, index.stride(), shape[missing:], strict=True
        )
    )


@kernel_memory("index.Tensor", "_unsafe_index.Tensor")
def index(call: Call) -> Steps:
    """Contiguous copies of indices with different strides."""
    shape, copied = _expanded(call.args[1])
    for _ in range(copied):
        yield buffer(prod(shape) * INDEX_BYTES)
    yield OUTPUTS


@kernel_memory("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def index_put(call: Call) -> Steps:
    """Accumulation sorts the indices; the values are made contiguous.

    Source: ``index_put_with_sort_kernel`` in ``native/cuda/Indexing.cu``.
    """
    tensor, indices, values = call.args[:3]
    if call.get(3) and indices[0] is not None and indices[0].dtype == torch.bool:
        yield from _added_by_mask(tensor, indices[0], values)
        return
    shape, copied = _expanded(indices)
    count = prod(shape)
    yield OUTPUTS
    if not call.get(3):  # added up
        for _ in range(copied):
            yield buffer(count * INDEX_BYTES)
        return
    chosen = [size for size, i in zip(tensor.shape, indices, strict=False) if i is None]
    last = max(k for k, i in enumerate(indices) if i is not None)
    wanted = count * prod(chosen) * prod(tensor.shape[len(indices) :])
    positions = tensor.numel() // max(prod(tensor.shape[last + 1 :]), 1)
    yield from _sorted_sum(values, count, wanted, positions)


def _added_by_mask(tensor: Tensor, mask: Tensor, values: Tensor) -> Steps:
    """Added where a mask of the first dimensions is true: its gradient, ``x[mask]``.

    The mask becomes an index for each of its dimensions (``nonzero``), as many as there
    are values.
    """
    rest = prod(tensor.shape[mask.dim() :])
    count = values.numel() // max(rest, 1)
    yield buffer(count * mask.dim() * INDEX_BYTES)
    yield OUTPUTS
    yield from _sorted_sum(values, count, count * rest, mask.numel())


def _sorted_sum(values: Tensor, count: int, wanted: int, positions: int) -> Steps:
    """Sort ``count`` indices below ``positions`` to add ``wanted`` elements up."""
    wrapped, each = (buffer(count * INDEX_BYTES) for _ in range(2))
    yield wrapped
    yield each  # flat
    yield Free(wrapped)
    copies = []
    if values.numel() != wanted or not values.is_contiguous():
        copies = [buffer(wanted * values.element_size())]
    yield from copies
    yield each  # sorted
    yield each  # original position of each
    yield each  # positions
    yield from freed_at_once(*scratch("index_put_sort", count, positions))
    for _ in range(3):
        yield Free(each)
    yield from map(Free, copies)


@kernel_memory("masked_scatter", "masked_scatter_")
def masked_scatter(call: Call) -> Steps:
    """A prefix sum of the mask in int64, and the expanded mask."""
    tensor, mask = call.args[:2]
    yield from scratch("masked_scatter", tensor.numel())
    if mask.shape != tensor.shape or not mask.is_contiguous():
        yield buffer(tensor.numel())


@kernel_memory("masked_scatter_backward")
def masked_scatter_backward(call: Call) -> Steps:
    """``nonzero`` of the mask, with an index per dimension, and the expanded mask.

    The number of true elements is data-dependent; programs that fill placeholders have
    as many as the source has elements, which is the output's size.
    """
    grad, mask, sizes = call.args[:3]
    if mask.shape != grad.shape or not mask.is_contiguous():
        yield buffer(grad.numel())
    yield buffer(prod(sizes) * grad.dim() * INDEX_BYTES)
    yield OUTPUTS


@kernel_memory("cumsum", "cumprod", "logcumsumexp")
def cumulative(call: Call) -> Steps:
    """A cast or a contiguous copy of the input; CUB for a single row."""
    tensor, dim = call.args[:2]
    if tensor.element_size() <= HALF_BYTES:
        yield Unverified()
    if tensor.dtype != call.out.dtype:
        yield copy_of(tensor, call.out.element_size())
    else:
        yield from contiguous_copies(tensor)
    if tensor.dim() and tensor.shape[dim] == tensor.numel() > 0:
        yield from scratch("scan", tensor.numel(), call.out.element_size())


@kernel_memory("sort.default", "sort.stable")
def sort(call: Call) -> Steps:
    """Indices, and the temporary storage of the radix sort."""
    tensor = call.args[0]
    if tensor.element_size() <= HALF_BYTES:
        yield Unverified()
    dim = call.kwargs.get("dim", -1 if "stable" in call.kwargs else call.get(1, -1))
    if tensor.dim():
        length = tensor.shape[dim]
        rows = tensor.numel() // max(length, 1)
        yield from scratch("sort", rows, length, tensor.element_size())


@kernel_memory("topk")
def topk(call: Call) -> Steps:
    """A contiguous input. Long rows are sorted by several blocks: not represented."""
    tensor, dim = call.args[0], call.get(2, -1)
    if tensor.dim() and tensor.shape[dim] >= LONG_ROW:
        yield Unverified()
    yield from contiguous_copies(tensor)


@kernel_memory("cummax", "cummin")
def contiguous_input(call: Call) -> Steps:
    """A contiguous input."""
    yield from contiguous_copies(call.args[0])


@kernel_memory("histc")
def histogram(call: Call) -> Steps:
    """Without a range it is asked of the tensor: not represented."""
    if call.get(2, 0) == call.get(3, 0):
        yield Unverified()


@kernel_memory("median.dim", "kthvalue")
def contiguous_input_first(call: Call) -> Steps:
    """A contiguous input."""
    yield from contiguous_copies(call.args[0])
    yield OUTPUTS


@kernel_memory("_cdist_backward")
def cdist_backward(call: Call) -> Steps:
    """The gradient of every pair, which is then summed."""
    one, distances = call.args[1], call.args[4]
    yield buffer(distances.numel() * one.shape[-1] * one.element_size())
