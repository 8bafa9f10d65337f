"""Scratch memory of softmax and losses, and the larger storages of some losses.

A loss that is a structured kernel computes every element's loss and reduces it; the
scalar may be a resized tensor that still owns all of them (``output_bytes_of``).
Sources: ``SoftMax.cu``, ``Loss.cu``, ``NLLLoss.cu`` and ``native/Loss.cpp``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._prims_common import (
    check_contiguous_sizes_strides,
    compute_elementwise_output_strides,
)

from budgetfit.tracing.cuda.kernel_memory.reduction import (
    InputLayout,
    input_vec_size,
    reduction,
)
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
    register_output_bytes,
    register_scratch,
    register_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

INDEX_BYTES = 8


@register_scratch("_softmax", "_log_softmax")
def softmax(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A contiguous input."""
    yield from contiguous_copies(args[0])


@register_scratch("_softmax_backward_data")
def softmax_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """The product grad x output, full size; ``softmax_backward_cuda_out``."""
    grad, output = args[:2]
    yield copy_of(grad)
    shape, strides = grad.shape, compute_elementwise_output_strides(grad, output)
    if not check_contiguous_sizes_strides(shape, strides):
        yield copy_of(grad)
    yield from contiguous_copies(output)


@register_scratch("_log_softmax_backward_data")
def log_softmax_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[Scratch]:
    """Only contiguous copies; ``host_softmax_backward``."""
    yield from contiguous_copies(*args[:2])


@register_scratch("nll_loss2d_forward")
def nll_loss2d(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Contiguous inputs, if the loss is reduced."""
    if _reduced(args, 3):
        yield from contiguous_copies(*(t for t in args[:3] if t is not None))


@register_scratch("nll_loss_forward")
def nll_loss(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Contiguous inputs."""
    yield from contiguous_copies(*(t for t in args[:3] if t is not None))


@register_scratch("nll_loss_backward")
def nll_loss_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Contiguous inputs."""
    yield from contiguous_copies(*(t for t in args[1:4] if t is not None))


def _reduced(args: Args, place: int, default: int = 1) -> bool:
    return bool(args[place] if len(args) > place else default)


def _reduction_of(tensor: Tensor) -> Scratch:
    data = InputLayout.contiguous(tensor.dtype, [tensor.numel()])
    return reduction(
        data, None, input_vector=input_vec_size(tensor.dtype), out_dtype=tensor.dtype
    )


@register_scratch("mse_loss", "smooth_l1_loss")
def elementwise_loss(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Every element's loss, once in the output's storage and once more."""
    if _reduced(args, 2):
        yield copy_of(args[0])
        yield _reduction_of(args[0])


@register_scratch("huber_loss")
def huber_loss(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Every element's loss, allocated before the output."""
    if _reduced(args, 2):
        yield copy_of(args[0], when="before")
        yield _reduction_of(args[0])


@register_scratch("binary_cross_entropy", "soft_margin_loss")
def in_place_loss(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Every element's loss stays in the output's storage; its sum is separate."""
    place = 3 if len(args) > 3 else 2  # noqa: PLR2004 - after an optional weight
    if _reduced(args, place):
        yield copy_of(out)
        yield _reduction_of(args[0])


@register_scratch("binary_cross_entropy_with_logits")
def logits_loss(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Every element's loss and one term of it, and ``pos_weight`` - 1.

    The latter is freed before the sum, which allocates about 1 KB.
    """
    yield copy_of(args[0], when="before")
    if len(args) > 3 and args[3] is not None:  # noqa: PLR2004 - the fourth argument
        yield copy_of(args[3], when="before")
    if _reduced(args, 4):
        yield copy_of(args[0], when="before")
        yield _reduction_of(args[0])


@register_output_bytes(
    "mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"
)
def full_loss_storage(args: Args, _kwargs: Kwargs, _out: object) -> int:
    """The scalar's storage is that of every element's loss."""
    return int(args[0].numel()) * int(args[0].element_size())


@register_steps("soft_margin_loss_backward")
def soft_margin_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[KernelStep]:
    """Three terms at once, and a product of two of them."""
    terms = [Alloc(copy_of(args[1])) for _ in range(3)]
    yield from terms
    yield from (Free(terms[1]), Free(terms[0]), Output(0), Free(terms[2]))


@register_scratch("multi_margin_loss")
def multi_margin_loss(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """The losses of all rows, if they are reduced."""
    if _reduced(args, 5):
        yield buffer(args[0].shape[0] * args[0].element_size())


@register_scratch("_ctc_loss_backward")
def ctc_loss_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Lengths and offsets on the GPU, and beta, as large as alpha."""
    samples, alpha = args[1].shape[1], args[6]
    for _ in range(3):
        yield buffer(samples * INDEX_BYTES, when="before")
    yield copy_of(alpha, when="before")
