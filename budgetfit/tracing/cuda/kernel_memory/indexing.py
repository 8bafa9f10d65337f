"""Embeddings, indexing, sorts and scans.

Sources: ``Embedding.cu``, ``Indexing.cu``, ``Sort.cpp``, ``ScanKernels.cpp`` in
``aten/src/ATen/native/cuda`` and ``TensorAdvancedIndexing.cpp``. Of the data-dependent
ops ``nonzero`` and boolean masks have no rule.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor
from torch._prims_common import (
    check_contiguous_sizes_strides,
    compute_elementwise_output_strides,
    is_non_overlapping_and_dense_or_false,
)
from torch._prims_common import make_contiguous_strides_for as contiguous_strides

from budgetfit.core.step_trace import KernelScratch
from budgetfit.tracing.cuda.kernel_memory.reductions import Layout, reduction
from budgetfit.tracing.cuda.kernel_memory.registry import (
    INDEX_BYTES,
    OUTPUTS,
    SINGLE_BYTES,
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
from budgetfit.tracing.records import Free, Output

aten = torch.ops.aten

MAXIMUM = 2  # mode of an embedding bag
ONE_BLOCK_SORT = 4096  # longest row that one thread block sorts
# ``isin`` compares all pairs below this number of tests, times elements ** the power.
FEW_TESTS = 10
FEW_TESTS_POWER = 0.145
LONGEST_MODE = 2048  # elements of a row whose mode one thread block finds
FEW_INDICES = 1024  # whose renormalisation takes more for CUB than for the sort


@kernel_memory("embedding")
def embedding(call: Call) -> Steps:
    """Flattened indices, copied if that needs a copy."""
    if not flattens(call.args[1]):
        yield copy_of(call.args[1])
    yield OUTPUTS


@kernel_memory("embedding_dense_backward")
def embedding_backward(call: Call) -> Steps:
    """More than 3072 indices are sorted and their rows summed in parts."""
    # Source: ``native/cuda/Embedding.cu`` and ``EmbeddingBackwardKernel.cu``.
    grad, indices, rows = call.args[:3]
    yield from contiguous_copies(grad, indices)
    counted = bool(call.get(4, False))
    yield from _summed_by_row(grad, indices, rows, bags=False, counted=counted)


def _summed_by_row(
    grad: Tensor, indices: Tensor, rows: int, *, bags: bool, counted: bool
) -> Steps:
    """Sort indices and sum their gradients in parts.

    ``bags``: of several indices share a gradient. ``counted``: gradients are divided by
    how often a row occurs. Both sort any number of indices; none is not represented.
    """
    if not grad.numel():
        yield Unverified()
    count, index, always = indices.numel(), indices.element_size(), bags or counted
    [each] = scratch("embedding_indices", count, index, always)
    segments = scratch("embedding_segments", count, rows, index, always)
    number = scratch("embedding_count", count, INDEX_BYTES, always)
    yield each  # sorted
    yield each  # original position of each
    yield each  # positions
    yield from freed_at_once(*scratch("embedding_sort", count, rows, index, always))
    yield Free(each)
    if counted:
        yield each
        for _ in range(2):
            yield from freed_at_once(*scratch("scan_by_key", count, index, always))
    yield OUTPUTS
    yield each  # where each segment starts
    yield from number  # of segments
    yield each  # counting
    yield from freed_at_once(*scratch("embedding_unique", count, index, always))
    yield Free(each)
    yield from segments  # partial sums per segment
    yield from segments  # and offset of each segment
    yield from freed_at_once(*scratch("embedding_scan", count, rows, index, always))
    yield from number
    columns, element = grad.shape[-1], grad.element_size()
    sizes = count, rows, columns, index, element, always, bags
    yield from scratch("embedding_partials", *sizes)


@kernel_memory("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(call: Call) -> Steps:
    """The bag of each index and the size of each bag, whatever the mode."""
    # Outputs are the sums, the bags, their sizes and, for maxima, where those are.
    # Source: ``_embedding_bag_cuda`` in ``native/cuda/EmbeddingBag.cu``.
    weight, indices, offsets = call.args[:3]
    maxima = call.get(4, 0) == MAXIMUM
    index = max(indices.element_size(), offsets.element_size())
    for tensor in (indices, offsets):
        if tensor.element_size() != index:
            yield copy_of(tensor, index)
    bags = offsets.numel() - bool(call.get(7, False))
    yield Output(2, size_bytes=offsets.numel() * index)
    yield Output(1, size_bytes=indices.numel() * index)
    yield Output(0)
    yield Output(3, size_bytes=bags * weight.shape[1] * index if maxima else 0)


@kernel_memory("_embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(call: Call) -> Steps:
    """Indices and offsets of different dtypes are not represented."""
    if call.args[2].dtype != call.args[3].dtype:
        yield Unverified()


@kernel_memory("_embedding_bag_dense_backward", "_embedding_bag_backward")
def embedding_bag_backward(call: Call) -> Steps:
    """As of an embedding, but maxima are added up directly; sparse: not verified."""
    grad, indices = call.args[:2]
    if call.out.is_sparse:
        yield Unverified()
        yield OUTPUTS
        return
    with_offsets = call.func.overloadpacket is aten._embedding_bag_backward
    rows, counted, mode = call.args[6:9] if with_offsets else call.args[5:8]
    yield from contiguous_copies(grad)
    if mode == MAXIMUM:
        yield OUTPUTS
        return
    yield from contiguous_copies(indices)
    yield from _summed_by_row(grad, indices, rows, bags=True, counted=counted)


def _expanded(indices: Sequence[Tensor | None]) -> tuple[torch.Size, int]:
    """Return the broadcast shape of the indices and how many are copied to it."""
    # The kernel reads all indices as int64, with the same strides.
    given = [index for index in indices if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    whole = contiguous_strides(shape)
    strides = [_expanded_stride(index, shape) for index in given]
    cast = [index.dtype == torch.int32 for index in given]
    for place, index in enumerate(given):
        if cast[place]:  # keeps the order of its dimensions, where it is not expanded
            same = index.shape == shape
            new = compute_elementwise_output_strides(index) if same else whole
            strides[place] = tuple(new)
    if len(set(strides)) == 1:
        return shape, sum(cast)
    return shape, sum(
        is_cast or not check_contiguous_sizes_strides(shape, stride)
        for is_cast, stride in zip(cast, strides, strict=True)
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
    """Accumulation sorts the indices; the values are made contiguous."""
    # Source: ``index_put_with_sort_kernel`` in ``native/cuda/Indexing.cu``.
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
    yield from contiguous_copies(call.out)
    chosen = [size for size, i in zip(tensor.shape, indices, strict=False) if i is None]
    last = max(k for k, i in enumerate(indices) if i is not None)
    wanted = count * prod(chosen) * prod(tensor.shape[len(indices) :])
    if not wanted:
        yield Unverified()
    positions = tensor.numel() // max(prod(tensor.shape[last + 1 :]), 1)
    yield from _sorted_sum(values, count, wanted, positions)


def _added_by_mask(tensor: Tensor, mask: Tensor, values: Tensor) -> Steps:
    """Added where a mask of the first dimensions is true: its gradient, ``x[mask]``."""
    # The mask becomes an index for each of its dimensions (``nonzero``), as many as
    # there are values.
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
    (_, mask, source), tensor = call.args[:3], call.out
    yield OUTPUTS
    if not tensor.numel():
        return
    prefix, storage = scratch("masked_scatter", tensor.numel())
    yield prefix
    if mask.shape != tensor.shape or not mask.is_contiguous():
        yield buffer(tensor.numel())
    yield from freed_at_once(storage)
    yield from contiguous_copies(source)


@kernel_memory("masked_scatter_backward")
def masked_scatter_backward(call: Call) -> Steps:
    """``nonzero`` of the mask, with an index per dimension, and the expanded mask."""
    # The number of true elements is data-dependent; programs that fill placeholders
    # have as many as the source has elements, which is the output's size.
    grad, mask, sizes = call.args[:3]
    if mask.shape != grad.shape or not mask.is_contiguous():
        yield buffer(grad.numel())
    yield buffer(prod(sizes) * grad.dim() * INDEX_BYTES)
    yield OUTPUTS


@kernel_memory("_coalesce")
def coalesce(call: Call) -> Steps:
    """Sorts flat indices with their places; how many differ is not known."""
    # Source: ``native/sparse/cuda/SparseCUDATensor.cu``.
    count = call.args[0]._nnz()
    each = buffer(count * INDEX_BYTES)
    for _ in range(3):
        yield each
    yield from freed_at_once(buffer(2 * count * INDEX_BYTES))
    yield OUTPUTS


@kernel_memory("scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_")
def scatter_reduce(call: Call) -> Steps:
    """A mean counts ones in the output's shape, and asks which counts are zero."""
    # ``index_reduce`` without the tensor itself overwrites it first, by int64 indices.
    index, source, reduce = call.args[2:5]
    by_index = call.func.overloadpacket in (aten.index_reduce, aten.index_reduce_)
    yield OUTPUTS
    overwritten = by_index and not call.kwargs.get("include_self", True)
    if overwritten and index.dtype != torch.int64:
        yield from freed_at_once(copy_of(index, INDEX_BYTES))
    if reduce != "mean":
        return
    ones, counts, zeros = copy_of(source), copy_of(call.out), copy_of(call.out, 1)
    if by_index:
        yield counts
        yield from freed_at_once(ones)
        yield zeros
    else:
        yield from (ones, counts, zeros)


# What CUB scans, by how it keeps the sums of tiles.
SCANNED_ALONE = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
}
SCANNED_IN_ARRAYS = {torch.float16, torch.bfloat16, torch.complex64, torch.complex128}


@kernel_memory("cumsum", "cumprod", "logcumsumexp")
def cumulative(call: Call) -> Steps:
    """A cast, then a contiguous copy of the input; CUB for a single row."""
    tensor, dim = call.args[:2]
    if not tensor.dim():
        return
    strides = tensor.stride()
    if tensor.dtype != call.out.dtype:
        yield copy_of(tensor, call.out.element_size())
        strides = compute_elementwise_output_strides(tensor)
    if not check_contiguous_sizes_strides(tensor.shape, strides):
        yield copy_of(tensor, call.out.element_size())
    if tensor.shape[dim] == tensor.numel() > 0:
        yield from _scan(tensor.numel(), call.out.dtype)


def _scan(count: int, dtype: torch.dtype) -> Steps:
    """CUB's scan of a single row."""
    if dtype in SCANNED_ALONE or dtype in SCANNED_IN_ARRAYS:
        in_arrays = int(dtype in SCANNED_IN_ARRAYS)
        yield from scratch("scan", count, dtype.itemsize, in_arrays)
    else:
        yield Unverified()


@kernel_memory("repeat_interleave.Tensor")
def repeat_interleave(call: Call) -> Steps:
    """Running sums of the repetitions, as int64; ``native/Repeat.cpp``."""
    repeats = call.args[0]
    yield from contiguous_copies(repeats)
    yield copy_of(repeats, INDEX_BYTES)
    read = repeats.dtype == torch.int64 and repeats.is_contiguous()
    copies = [] if read else [copy_of(repeats, INDEX_BYTES)]
    yield from freed_at_once(*copies, *scratch("scan", repeats.numel(), INDEX_BYTES, 0))
    yield OUTPUTS


@kernel_memory("segment_reduce", "_segment_reduce_backward")
def segment_reduce(call: Call) -> Steps:
    """Where each segment begins or, if that is given, how long each is."""
    # Source: ``native/cuda/SegmentReduce.cu``.
    forward = call.func is aten.segment_reduce.default
    data, lengths = call.args[0 if forward else 2], call.kwargs.get("lengths")
    yield OUTPUTS
    if lengths is None:
        offsets = call.kwargs["offsets"]
        yield buffer((offsets.numel() - 1) * offsets.element_size())
    else:
        zero = buffer(lengths.element_size())
        yield zero
        yield buffer((lengths.numel() + 1) * lengths.element_size())
        yield Free(zero)
        count, each = lengths.numel() + 1, lengths.element_size()
        yield from freed_at_once(*scratch("scan", count, each, 0))
    if forward and data.dim() == 1:
        yield buffer(1)  # for CUB
    if call.kwargs.get("axis") or data.numel() == 0:
        yield Unverified()


@kernel_memory("mode")
def mode(call: Call) -> Steps:
    """Rows in one piece; ``native/cuda/TensorModeKernel.cpp``."""
    tensor, dim = call.args[0], call.get(1, -1)
    yield OUTPUTS
    if tensor.dim() and not tensor.transpose(dim, -1).is_contiguous():
        yield copy_of(tensor)
    if tensor.dim() and tensor.shape[dim] > LONGEST_MODE:
        yield Unverified()


@kernel_memory("multinomial")
def multinomial(call: Call) -> Steps:
    """Draws with replacement are found in running sums of the weights."""
    # Without replacement, or of one sample: extrema and two answers about them, weights
    # over draws and, of several samples, the largest. Source: ``multinomial`` in
    # ``native/Distributions.cpp``, and ``MultinomialKernel.cu``.
    weights, samples = call.args[:2]
    yield OUTPUTS
    if call.get(2, False) and samples > 1:
        yield from [copy_of(weights)] * 3
        if weights.shape[-1] == weights.numel():
            yield from _scan(weights.numel(), weights.dtype)
        return
    yield from [buffer(weights.element_size())] * 2
    yield from [buffer(1)] * 2
    yield copy_of(weights)
    if samples > 1:
        yield copy_of(call.out, weights.element_size())


@kernel_memory("sort.default", "sort.stable")
def sort(call: Call) -> Steps:
    """Long rows are sorted where they are dense; their results are copied back."""
    # Keys of 16 bits and less have an upper bound before compute capability 9.0: their
    # kernel asks for the occupancy of the card. Source: ``native/cuda/Sort.cpp``.
    dim = call.kwargs.get("dim", -1 if "stable" in call.kwargs else call.get(1, -1))
    if call.args[0].dim():
        yield from _sorting(call.args[0], dim, call.out)


def _sorting(
    tensor: Tensor, dim: int, results: Sequence[Tensor]
) -> Iterator[KernelScratch[int]]:
    length = tensor.shape[dim]
    if not tensor.numel():
        return
    if length > ONE_BLOCK_SORT:
        strides = tensor.stride()
        dense = is_non_overlapping_and_dense_or_false(tensor)
        if not (dense and strides[dim] == 1):
            strides = _dense_strides(tensor, dim)
            yield copy_of(tensor)
        for result in results:
            if result.stride() != strides:
                yield copy_of(result)
    rows = tensor.numel() // max(length, 1)
    yield from scratch("sort", rows, length, tensor.element_size())


def _dense_strides(tensor: Tensor, last: int) -> tuple[int, ...]:
    """Return dense strides in the tensor's order, but with ``last`` innermost."""
    ndim, strides_of = tensor.dim(), tensor.stride()
    order = sorted(range(ndim), key=lambda d: (d == last % ndim, -strides_of[d]))
    strides, step = [0] * ndim, 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(tensor.shape[dim], 1)
    return tuple(strides)


@kernel_memory("embedding_renorm_")
def embedding_renorm(call: Call) -> Steps:
    """Indices, sorted, then each once; ``embedding_renorm_cuda_`` in ``Embedding.cu``.

    CUB's storage for the latter, some KB, is not represented: of few indices it is more
    than what sorting takes.
    """
    indices = call.args[1]
    count = indices.numel()
    places = buffer(count * INDEX_BYTES)
    if not count:
        return
    if count < FEW_INDICES:
        yield Unverified()
    for _ in range(2):
        yield copy_of(indices)
    yield from contiguous_copies(indices)
    yield places
    yield from freed_at_once(*scratch("sort", 1, count, indices.element_size()))
    yield Free(places)
    yield copy_of(indices)
    yield buffer(INDEX_BYTES)


@kernel_memory("topk")
def topk(call: Call) -> Steps:
    """A contiguous input; several blocks share a long row, or many rows."""
    # Source: ``native/cuda/TensorTopK.cu``.
    tensor, count, dim = call.args[0], call.args[1], call.get(2, -1)
    yield OUTPUTS
    if not tensor.dim():
        return
    length = tensor.shape[dim]
    rows = tensor.numel() // max(length, 1)
    shared = scratch("topk", rows, length, tensor.element_size())
    yield from freed_at_once(*contiguous_copies(tensor), *shared)
    if call.get(4, True) and count > ONE_BLOCK_SORT:
        values, indices = call.out
        yield copy_of(indices)
        yield copy_of(values)
        yield from freed_at_once(*_sorting(values, dim, call.out))
        yield copy_of(indices)


@kernel_memory("histc")
def histogram(call: Call) -> Steps:
    """Without a range it is asked of the tensor: not represented."""
    if call.get(2, 0) == call.get(3, 0):
        yield Unverified()


@kernel_memory("bucketize.Tensor")
def bucketize(call: Call) -> Steps:
    """Contiguous values and boundaries; of different dtypes: not represented."""
    if call.args[0].dtype != call.args[1].dtype:
        yield Unverified()
    yield from contiguous_copies(*call.args[:2])


@kernel_memory("searchsorted.Tensor")
def searchsorted(call: Call) -> Steps:
    """Contiguous values and boundaries, then in one dtype; a sorter is small."""
    boundaries, values = call.args[:2]
    if call.kwargs.get("sorter") is not None or not values.dim():
        yield Unverified()
    yield OUTPUTS
    yield from contiguous_copies(values, boundaries)
    common = torch.promote_types(values.dtype, boundaries.dtype)
    for tensor in (values, boundaries):
        if tensor.dtype != common:
            yield copy_of(tensor, common.itemsize)


@kernel_memory("isin.Tensor_Tensor")
def isin(call: Call) -> Steps:
    """Compares all pairs; more than a few tests are sorted: not represented."""
    # Source: ``isin_Tensor_Tensor_out`` in ``native/TensorCompare.cpp``.
    elements, tests = call.args[:2]
    if tests.numel() >= FEW_TESTS * elements.numel() ** FEW_TESTS_POWER:
        yield Unverified()
        return
    yield OUTPUTS
    yield buffer(elements.numel() * tests.numel())
    yield copy_of(call.out)
    pairs = Layout.contiguous(torch.bool, [elements.numel(), tests.numel()])
    yield from reduction(pairs, [1], torch.bool, 1, 4)


@kernel_memory("_unique2")
def unique(call: Call) -> Steps:
    """Sorted keys, with their places for the inverse; outputs have room for all."""
    # CUB's storage for keys without places is not represented;
    # ``native/cuda/Unique.cu``.
    yield Unverified()
    tensor, inverse, counts = call.args[0], call.get(2), call.get(3)
    keys, each = copy_of(tensor), buffer(tensor.numel() * INDEX_BYTES)
    yield keys
    if inverse:
        yield each  # sorted places
        sizes = 1, tensor.numel(), tensor.element_size()
        yield from freed_at_once(*scratch("sort", *sizes))
        yield Output(1, size_bytes=tensor.numel() * INDEX_BYTES)
        yield from freed_at_once(each)
    else:
        yield from freed_at_once(copy_of(tensor))
    yield Output(0, size_bytes=tensor.numel() * tensor.element_size())
    if counts:
        yield Output(2, size_bytes=tensor.numel() * INDEX_BYTES)


@kernel_memory("median.default", "nanmedian.default")
def median(call: Call) -> Steps:
    """All elements sorted in one row; without NaNs those are counted."""
    # Source: ``median_impl`` in ``native/cuda/Sorting.cpp``.
    tensor = call.args[0]
    count = tensor.numel()
    if not count:
        return
    if not (whole := flattens(tensor)):
        yield copy_of(tensor)
    values, indices = copy_of(tensor), buffer(count * INDEX_BYTES)
    yield values
    yield indices
    steps = [d for n, d in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    if whole and count > ONE_BLOCK_SORT and steps[-1] != 1:
        yield copy_of(tensor)
    yield from freed_at_once(*scratch("sort", 1, count, tensor.element_size()))
    yield Free(indices)
    if call.func is aten.nanmedian.default:
        if not tensor.is_floating_point():
            yield Unverified()
        yield from _place_below_nans(count)
    else:
        yield buffer(1)  # whether the largest is NaN
    yield OUTPUTS


def _place_below_nans(count: int) -> Steps:
    """Count NaNs in int64; half of what is left as int64, fp32 and int64 again."""
    mask, number = buffer(count), buffer(INDEX_BYTES)
    yield mask
    yield number
    data = Layout.contiguous(torch.int64, [count])
    cast = buffer(count * INDEX_BYTES)
    yield from freed_at_once(cast, *reduction(data, None, torch.int64))
    others, half = buffer(INDEX_BYTES), buffer(SINGLE_BYTES)
    yield others
    yield half
    yield buffer(INDEX_BYTES)
    yield from map(Free, (half, others, number, mask))
