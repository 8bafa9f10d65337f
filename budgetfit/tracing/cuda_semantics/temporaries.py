"""Which ops' CUDA kernels take memory that a trace on CPU tensors does not see.

Importing this module registers them all; ``temporaries_of`` answers. The next rule is
a few lines: a formula in ``memory.kernel_scratch`` and a function here or beside.

All scratch of an op is taken to live until the op ends. Where a kernel frees a buffer
before it allocates the next, only the moment with the most memory is represented: the
peak inside the op is exact, the order of small requests is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._prims_common import (
    check_contiguous_sizes_strides,
    compute_elementwise_output_strides,
)

from budgetfit.tracing.cuda_semantics import (
    attention_temporaries,
    reduction_temporaries,
)
from budgetfit.tracing.cuda_semantics.scratch_registry import (
    Args,
    Kwargs,
    Scratch,
    copy_of,
    scratch,
    temporaries_of,
    temporary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = [
    "Scratch",
    "attention_temporaries",
    "reduction_temporaries",
    "scratch",
    "temporaries_of",
    "temporary",
]


@temporary("_softmax_backward_data.default")
def softmax_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """The product of both, full size (M38); ``softmax_backward_cuda_out``."""
    grad, output = args[:2]
    yield copy_of(grad)
    shape, strides = grad.shape, compute_elementwise_output_strides(grad, output)
    if not check_contiguous_sizes_strides(shape, strides):
        yield copy_of(grad)
    if not output.is_contiguous():
        yield copy_of(output)


@temporary("_log_softmax_backward_data.default")
def log_softmax_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[Scratch]:
    """Only contiguous copies; ``SoftMax.cu``, ``host_softmax_backward``."""
    for tensor in args[:2]:
        if not tensor.is_contiguous():
            yield copy_of(tensor)


@temporary("native_layer_norm_backward")
def layer_norm_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Contiguous copies, and two passes for many short rows (M34)."""
    grad, tensor, shape = args[:3]
    mask = args[7]
    for copied in (grad, tensor):
        if not copied.is_contiguous():
            yield copy_of(copied, when="before")
    yield _norm_backward(tensor, shape, gamma=mask[1], beta=mask[2])


@temporary("_fused_rms_norm_backward")
def rms_norm_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """The same without a bias."""
    grad, tensor, shape = args[:3]
    mask = args[5]
    for copied in (grad, tensor):
        if not copied.is_contiguous():
            yield copy_of(copied, when="before")
    yield _norm_backward(tensor, shape, gamma=mask[1], beta=False)


def _norm_backward(
    tensor: Tensor, shape: list[int], *, gamma: bool, beta: bool
) -> Scratch:
    columns = 1
    for size in shape:
        columns *= size
    rows = tensor.numel() // max(columns, 1)
    return scratch("norm_backward", rows, columns, tensor.element_size(), gamma, beta)


@temporary("embedding_dense_backward")
def embedding_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Sorted indices and partial sums for more than 3072 of them (M35)."""
    grad, indices, rows = args[:3]
    if not grad.is_contiguous():
        yield copy_of(grad, when="before")
    count, index = indices.numel(), indices.element_size()
    yield scratch("embedding_sorted", count, index, when="before")
    yield scratch(
        "embedding_partials", count, rows, grad.shape[-1], index, grad.element_size()
    )
