"""Scratch of embeddings, indexing, sorts and scans.

Sources: ``Embedding.cu``, ``Indexing.cu``, ``Sort.cpp``, ``ScanKernels.cpp`` in
``aten/src/ATen/native/cuda`` and ``TensorAdvancedIndexing.cpp``; rules M35 and M39 of
cuda-memory.md. Whatever depends on values (``nonzero``, boolean masks, ``unique``) has
no rule.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch._prims_common import check_contiguous_sizes_strides

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Born,
    Give,
    InnerStep,
    Kwargs,
    Scratch,
    Take,
    buffer,
    contiguous_copies,
    copy_of,
    flattens,
    in_steps,
    scratch,
    temporary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

INDEX_BYTES = 8


@temporary("embedding")
def embedding(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """The indices in one row, copied if they do not lie so."""
    if not flattens(args[1]):
        yield copy_of(args[1], when="before")


@in_steps("embedding_dense_backward")
def embedding_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[InnerStep]:
    """More than 3072 indices are sorted and their rows summed by parts (M35).

    Source: ``native/cuda/Embedding.cu`` and ``EmbeddingBackwardKernel.cu``.
    """
    grad, indices, rows = args[:3]
    for copy in contiguous_copies(grad, indices):
        yield Take(copy)
    count, index = indices.numel(), indices.element_size()
    each = scratch("embedding_indices", count, index)
    segments = scratch("embedding_segments", count, rows, index)
    number = scratch("embedding_count", count, INDEX_BYTES)
    yield Take(each)  # sorted
    yield Take(each)  # the place of each before
    places = Take(each)
    yield places
    yield from _passing(scratch("embedding_sort", count, rows, index))
    yield Give(places)
    yield Born(0)
    yield Take(each)  # where each segment starts
    yield Take(number)  # how many there are
    counting = Take(each)
    yield counting
    yield from _passing(scratch("embedding_unique", count, index))
    yield Give(counting)
    yield Take(segments)  # partial sums in each
    yield Take(segments)  # and before each
    yield from _passing(scratch("embedding_scan", count, rows, index))
    yield Take(number)
    columns, element = grad.shape[-1], grad.element_size()
    yield Take(scratch("embedding_partials", count, rows, columns, index, element))


def _passing(size: Scratch) -> Iterator[InnerStep]:
    """Storage of a CUB call: taken and given back."""
    take = Take(size)
    yield take
    yield Give(take)


def _expanded(indices: Sequence[Tensor | None]) -> tuple[torch.Size, int]:
    """Return the common shape of the indices and how many must be copied to it.

    The kernel walks all indices with the same strides.
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


@temporary("index.Tensor", "_unsafe_index.Tensor")
def index(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Indices of different strides become contiguous."""
    shape, copied = _expanded(args[1])
    for _ in range(copied):
        yield buffer(prod(shape) * INDEX_BYTES, when="before")


@in_steps("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def index_put(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[InnerStep]:
    """Accumulation sorts the indices; the values become contiguous.

    Source: ``index_put_with_sort_kernel`` in ``native/cuda/Indexing.cu``.
    """
    yield Born(0)
    tensor, indices, values = args[:3]
    accumulate = len(args) > 3 and args[3]  # noqa: PLR2004 - the fourth argument
    shape, copied = _expanded(indices)
    if not accumulate:
        for _ in range(copied):
            yield Take(buffer(prod(shape) * INDEX_BYTES))
        return
    chosen = [size for size, i in zip(tensor.shape, indices, strict=False) if i is None]
    last = max(k for k, i in enumerate(indices) if i is not None)
    rest = [*chosen, *tensor.shape[len(indices) :]]
    wanted = prod(shape) * prod(rest)
    inner = prod(tensor.shape[last + 1 :])
    positions = tensor.numel() // max(inner, 1)
    each = buffer(prod(shape) * INDEX_BYTES)
    wrapped, flat = Take(each), Take(each)
    yield wrapped
    yield flat
    yield Give(wrapped)
    copied_values = Take(buffer(wanted * values.element_size()))
    copies = values.numel() != wanted or not values.is_contiguous()
    if copies:
        yield copied_values
    order = [Take(each) for _ in ("sorted", "the place of each before")]
    yield from order
    places = Take(each)
    yield places
    yield from _passing(scratch("index_put_sort", prod(shape), positions))
    yield from (Give(take) for take in (places, *reversed(order)))
    if copies:
        yield Give(copied_values)


@temporary("masked_scatter", "masked_scatter_")
def masked_scatter(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A running count of the mask in 8 bytes an element, and the mask in full."""
    tensor, mask = args[:2]
    yield scratch("masked_scatter", tensor.numel())
    if mask.shape != tensor.shape or not mask.is_contiguous():
        yield buffer(tensor.numel())


@temporary("masked_scatter_backward")
def masked_scatter_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[Scratch]:
    """The place of each chosen element, as many numbers as dimensions, and the mask.

    How many are chosen is data; programs that fill placeholders choose as many as the
    source has, which is the output's size.
    """
    grad, mask, sizes = args[:3]
    if mask.shape != grad.shape or not mask.is_contiguous():
        yield buffer(grad.numel(), when="before")
    yield buffer(prod(sizes) * grad.dim() * INDEX_BYTES, when="before")


@temporary("cumsum", "cumprod", "logcumsumexp")
def running_sum(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """A cast or a contiguous copy of the input; CUB for a single row."""
    tensor, dim = args[:2]
    if tensor.dtype != out.dtype:
        yield copy_of(tensor, out.element_size())
    else:
        yield from contiguous_copies(tensor)
    if tensor.dim() and tensor.shape[dim] == tensor.numel() > 0:
        yield scratch("scan", tensor.numel(), out.element_size())


@temporary("sort.default", "sort.stable")
def sort(args: Args, kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Places, and what the radix sort takes."""
    tensor = args[0]
    stable = "stable" in kwargs
    dim = kwargs.get("dim", args[1] if len(args) > 1 and not stable else -1)
    if not tensor.dim():
        return
    length = tensor.shape[dim]
    rows = tensor.numel() // max(length, 1)
    yield scratch("sort", rows, length, tensor.element_size())


@temporary("topk", "cummax", "cummin")
def contiguous_after(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A contiguous input. Long rows are sorted by several blocks: not represented."""
    yield from contiguous_copies(args[0])


@temporary("median.dim", "kthvalue")
def contiguous_before(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A contiguous input."""
    yield from contiguous_copies(args[0], when="before")


@temporary("_cdist_backward")
def distances_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """The gradient of every pair, which is then summed."""
    one, distances = args[1], args[4]
    yield buffer(distances.numel() * one.shape[-1] * one.element_size())
