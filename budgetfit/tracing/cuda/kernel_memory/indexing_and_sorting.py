"""Scratch memory of embeddings, indexing, sorts and scans.

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
    Alloc,
    Args,
    Free,
    KernelStep,
    Kwargs,
    Output,
    Scratch,
    buffer,
    contiguous_copies,
    copy_of,
    flattens,
    register_scratch,
    register_steps,
    scratch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

INDEX_BYTES = 8


@register_scratch("embedding")
def embedding(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Flattened indices, copied if that needs a copy."""
    if not flattens(args[1]):
        yield copy_of(args[1], when="before")


@register_steps("embedding_dense_backward")
def embedding_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[KernelStep]:
    """More than 3072 indices are sorted and their rows summed in parts.

    Source: ``native/cuda/Embedding.cu`` and ``EmbeddingBackwardKernel.cu``.
    """
    grad, indices, rows = args[:3]
    for copy in contiguous_copies(grad, indices):
        yield Alloc(copy)
    count, index = indices.numel(), indices.element_size()
    each = scratch("embedding_indices", count, index)
    segments = scratch("embedding_segments", count, rows, index)
    number = scratch("embedding_count", count, INDEX_BYTES)
    yield Alloc(each)  # sorted
    yield Alloc(each)  # original position of each
    positions = Alloc(each)
    yield positions
    yield from _freed_at_once(scratch("embedding_sort", count, rows, index))
    yield Free(positions)
    yield Output(0)
    yield Alloc(each)  # where each segment starts
    yield Alloc(number)  # number of segments
    counting = Alloc(each)
    yield counting
    yield from _freed_at_once(scratch("embedding_unique", count, index))
    yield Free(counting)
    yield Alloc(segments)  # partial sums per segment
    yield Alloc(segments)  # and offset of each segment
    yield from _freed_at_once(scratch("embedding_scan", count, rows, index))
    yield Alloc(number)
    columns, element = grad.shape[-1], grad.element_size()
    yield Alloc(scratch("embedding_partials", count, rows, columns, index, element))


def _freed_at_once(size: Scratch) -> Iterator[KernelStep]:
    """Allocate and free the temporary storage of a CUB call."""
    alloc = Alloc(size)
    yield alloc
    yield Free(alloc)


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


@register_scratch("index.Tensor", "_unsafe_index.Tensor")
def index(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Contiguous copies of indices with different strides."""
    shape, copied = _expanded(args[1])
    for _ in range(copied):
        yield buffer(prod(shape) * INDEX_BYTES, when="before")


@register_steps("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def index_put(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[KernelStep]:
    """Accumulation sorts the indices; the values are made contiguous.

    Source: ``index_put_with_sort_kernel`` in ``native/cuda/Indexing.cu``.
    """
    yield Output(0)
    tensor, indices, values = args[:3]
    accumulate = len(args) > 3 and args[3]  # noqa: PLR2004 - the fourth argument
    shape, copied = _expanded(indices)
    if not accumulate:
        for _ in range(copied):
            yield Alloc(buffer(prod(shape) * INDEX_BYTES))
        return
    chosen = [size for size, i in zip(tensor.shape, indices, strict=False) if i is None]
    last = max(k for k, i in enumerate(indices) if i is not None)
    rest = [*chosen, *tensor.shape[len(indices) :]]
    wanted = prod(shape) * prod(rest)
    inner = prod(tensor.shape[last + 1 :])
    positions = tensor.numel() // max(inner, 1)
    each = buffer(prod(shape) * INDEX_BYTES)
    wrapped, flat = Alloc(each), Alloc(each)
    yield wrapped
    yield flat
    yield Free(wrapped)
    copied_values = Alloc(buffer(wanted * values.element_size()))
    copies = values.numel() != wanted or not values.is_contiguous()
    if copies:
        yield copied_values
    order = [Alloc(each) for _ in ("sorted", "original position of each")]
    yield from order
    iota = Alloc(each)
    yield iota
    yield from _freed_at_once(scratch("index_put_sort", prod(shape), positions))
    yield from (Free(alloc) for alloc in (iota, *reversed(order)))
    if copies:
        yield Free(copied_values)


@register_scratch("masked_scatter", "masked_scatter_")
def masked_scatter(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A prefix sum of the mask in int64, and the expanded mask."""
    tensor, mask = args[:2]
    yield scratch("masked_scatter", tensor.numel())
    if mask.shape != tensor.shape or not mask.is_contiguous():
        yield buffer(tensor.numel())


@register_scratch("masked_scatter_backward")
def masked_scatter_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[Scratch]:
    """``nonzero`` of the mask, with an index per dimension, and the expanded mask.

    The number of true elements is data-dependent; programs that fill placeholders have
    as many as the source has elements, which is the output's size.
    """
    grad, mask, sizes = args[:3]
    if mask.shape != grad.shape or not mask.is_contiguous():
        yield buffer(grad.numel(), when="before")
    yield buffer(prod(sizes) * grad.dim() * INDEX_BYTES, when="before")


@register_scratch("cumsum", "cumprod", "logcumsumexp")
def cumulative(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """A cast or a contiguous copy of the input; CUB for a single row."""
    tensor, dim = args[:2]
    if tensor.dtype != out.dtype:
        yield copy_of(tensor, out.element_size())
    else:
        yield from contiguous_copies(tensor)
    if tensor.dim() and tensor.shape[dim] == tensor.numel() > 0:
        yield scratch("scan", tensor.numel(), out.element_size())


@register_scratch("sort.default", "sort.stable")
def sort(args: Args, kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Indices, and the temporary storage of the radix sort."""
    tensor = args[0]
    stable = "stable" in kwargs
    dim = kwargs.get("dim", args[1] if len(args) > 1 and not stable else -1)
    if not tensor.dim():
        return
    length = tensor.shape[dim]
    rows = tensor.numel() // max(length, 1)
    yield scratch("sort", rows, length, tensor.element_size())


@register_scratch("topk", "cummax", "cummin")
def contiguous_input(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A contiguous input. Long rows are sorted by several blocks: not represented."""
    yield from contiguous_copies(args[0])


@register_scratch("median.dim", "kthvalue")
def contiguous_input_before(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[Scratch]:
    """A contiguous input."""
    yield from contiguous_copies(args[0], when="before")


@register_scratch("_cdist_backward")
def cdist_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """The gradient of every pair, which is then summed."""
    one, distances = args[1], args[4]
    yield buffer(distances.numel() * one.shape[-1] * one.element_size())
