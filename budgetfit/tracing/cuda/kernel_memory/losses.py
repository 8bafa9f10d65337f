"""Softmax and losses, and the larger storages of some losses.

A loss that is a structured kernel computes every element's loss and reduces it; the
scalar may be a resized tensor that still owns all of them (``_full_storage``). Sources:
``SoftMax.cu``, ``Loss.cu``, ``NLLLoss.cu`` and ``native/Loss.cpp``.
"""

from math import prod

import torch
from torch._prims_common import (
    check_contiguous_sizes_strides,
    compute_elementwise_output_strides,
)

from budgetfit.core.step_trace import KernelScratch
from budgetfit.tracing.cuda.kernel_memory.reductions import Layout, reduction
from budgetfit.tracing.cuda.kernel_memory.registry import (
    INDEX_BYTES,
    OUTPUTS,
    Call,
    Steps,
    Unverified,
    buffer,
    contiguous_copies,
    copy_of,
    freed_at_once,
    kernel_memory,
    resized,
)
from budgetfit.tracing.records import Free, Output


@kernel_memory("_softmax_backward_data")
def softmax_backward(call: Call) -> Steps:
    """The product grad x output, full size; ``softmax_backward_cuda_out``."""
    grad, output = call.args[:2]
    yield copy_of(grad)
    strides = compute_elementwise_output_strides(grad, output)
    if not check_contiguous_sizes_strides(grad.shape, strides):
        yield copy_of(grad)
    yield from contiguous_copies(output)


@kernel_memory("nll_loss2d_forward")
def nll_loss2d(call: Call) -> Steps:
    """Contiguous inputs, if the loss is reduced."""
    if call.get(3, 1):
        yield from contiguous_copies(*call.args[:3])


LARGE_CTC = 450


def _one_dtype(call: Call) -> Steps:
    """Inputs of different dtypes are not represented."""
    if len({x.dtype for x in call.args if isinstance(x, torch.Tensor)}) > 1:
        yield Unverified()


def _one_shape(call: Call) -> Steps:
    """A target with more elements than the input is not represented."""
    if _losses_bytes(call) > call.args[0].numel() * call.out.element_size():
        yield Unverified()


def _losses_bytes(call: Call) -> int:
    """Return the bytes of every element's loss; inputs and targets are broadcast."""
    shape = torch.broadcast_shapes(call.args[0].shape, call.args[1].shape)
    return prod(shape) * int(call.out.element_size())


def _full_storage(call: Call) -> Output:
    """The scalar's storage is that of every element's loss."""
    own = call.out.numel() * call.out.element_size()
    return Output(0, size_bytes=max(_losses_bytes(call), own))


@kernel_memory(
    "binary_cross_entropy_backward",
    "huber_loss_backward",
    "mse_loss_backward",
    "smooth_l1_loss_backward",
)
def elementwise_loss_backward(call: Call) -> Steps:
    """A gradient in the input's size, resized where the target is larger."""
    yield from _one_dtype(call)
    yield from resized(call.args[1], call.out)


@kernel_memory("nll_loss2d_backward")
def nll_loss2d_backward(call: Call) -> Steps:
    """A contiguous target, if the loss is reduced."""
    yield OUTPUTS
    if call.args[4]:
        yield from contiguous_copies(call.args[2])


def _sum_of_losses(call: Call) -> tuple[KernelScratch[int], ...]:
    dtype = call.out.dtype
    data = Layout.contiguous(dtype, [_losses_bytes(call) // dtype.itemsize])
    return reduction(data, None, dtype)


@kernel_memory("mse_loss", "smooth_l1_loss")
def elementwise_loss(call: Call) -> Steps:
    """Every element's loss, once in the output's storage and once more."""
    yield _full_storage(call)
    if call.get(2, 1):
        yield buffer(_losses_bytes(call))
        yield from _sum_of_losses(call)


@kernel_memory("multilabel_margin_loss_forward")
def multilabel_margin_loss(call: Call) -> Steps:
    """Which classes are targets, and the loss of each sample."""
    # Source: ``native/cuda/MultiLabelMarginCriterion.cu``.
    tensor, target, is_reduced = call.args[:3]
    yield from contiguous_copies(tensor, target)
    yield Output(1)
    if is_reduced and tensor.dim() > 1:
        losses = Layout.contiguous(tensor.dtype, tensor.shape[:1])
        yield buffer(len(tensor) * tensor.element_size())
        yield OUTPUTS
        yield from reduction(losses, None, tensor.dtype)


@kernel_memory("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(call: Call) -> Steps:
    """Contiguous inputs."""
    yield OUTPUTS
    yield from contiguous_copies(*call.args[1:3], call.args[4])


@kernel_memory("huber_loss")
def huber_loss(call: Call) -> Steps:
    """Every element's loss, in the input's size, resized if the target is larger."""
    yield from _one_dtype(call)
    losses = buffer(_losses_bytes(call))
    too_small = copy_of(call.args[0])
    is_resized = too_small != losses
    is_reduced = call.get(2, 1)
    if is_resized:
        yield too_small
    yield losses if is_reduced else OUTPUTS
    if is_resized:
        yield Free(too_small)
    if is_reduced:
        yield OUTPUTS
        yield from _sum_of_losses(call)


@kernel_memory("binary_cross_entropy", "soft_margin_loss")
def in_place_loss(call: Call) -> Steps:
    """Every element's loss stays in the output's storage; its sum is separate."""
    # The reduction is the last argument, after an optional weight.
    yield from _one_dtype(call)
    yield from _one_shape(call)
    yield _full_storage(call)
    place = 3 if len(call.args) > 3 else 2  # noqa: PLR2004
    if call.get(place, 1):
        yield copy_of(call.out)
        yield from _sum_of_losses(call)


@kernel_memory("binary_cross_entropy_with_logits")
def logits_loss(call: Call) -> Steps:
    """Every element's loss and one term of it, and ``pos_weight`` - 1."""
    # The latter is freed before the sum, which allocates about 1 KB.
    tensor, weight, is_reduced = call.args[0], call.get(3), call.get(4, 1)
    yield from _one_dtype(call)
    yield copy_of(tensor)
    if weight is not None:
        yield copy_of(weight)
    if is_reduced:
        yield copy_of(tensor)
    yield OUTPUTS
    if is_reduced:
        yield from _sum_of_losses(call)


@kernel_memory("soft_margin_loss_backward")
def soft_margin_backward(call: Call) -> Steps:
    """Three terms at once, and a product of two of them."""
    yield from _one_dtype(call)
    terms = [copy_of(call.args[2]), *(copy_of(call.out) for _ in range(2))]
    yield from terms
    yield from (Free(terms[1]), Free(terms[0]), OUTPUTS, Free(terms[2]))


@kernel_memory("multi_margin_loss")
def multi_margin_loss(call: Call) -> Steps:
    """Contiguous inputs, and the losses of all rows, if they are reduced."""
    yield OUTPUTS
    yield from contiguous_copies(*call.args[:2])
    if call.get(5, 1):
        yield buffer(call.args[0].shape[0] * call.args[0].element_size())


@kernel_memory("_ctc_loss_backward")
def ctc_loss_backward(call: Call) -> Steps:
    """Lengths and offsets on the GPU, and beta, as large as alpha."""
    # In a large problem the blanks' part is summed by ``logsumexp``; ``LossCTC.cu``.
    (steps, samples, classes), alpha = call.args[1].shape, call.args[6]
    for _ in range(3):
        yield buffer(samples * INDEX_BYTES)
    yield copy_of(alpha)
    yield OUTPUTS
    if 2 * steps + 24 * samples / 10 + 2 * classes / 10 > LARGE_CTC:
        of_step = buffer(samples * steps * alpha.element_size())
        labels = (alpha.shape[-1] + 1) // 2
        blanks = buffer(samples * steps * labels * alpha.element_size())
        yield blanks
        yield of_step
        yield from freed_at_once(of_step, buffer(samples * steps))
        yield blanks
        yield of_step
