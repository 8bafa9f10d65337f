"""Layer, RMS, group and batch normalization; the latter without cuDNN.

In channels-last format thread blocks of a batch norm share a channel through a staging
buffer; strides of any other kind take the general reductions. Sources:
``layer_norm_kernel.cu`` and ``group_norm_kernel.cu`` in ``aten/src/ATen/native/cuda``,
``Normalization.cuh`` (``batch_norm_stats_channels_last_cuda_template``) and
``Normalization.cu`` (``batch_norm_choose_impl``, ``batch_norm_backward_cuda``).
"""

from math import prod
from typing import Literal

import torch
from torch import Tensor

from budgetfit.core.step_trace import KernelScratch
from budgetfit.memory.scratch_sizes.rules import MAX_INDEX
from budgetfit.tracing.cuda.kernel_memory.reductions import Layout, welford
from budgetfit.tracing.cuda.kernel_memory.registry import (
    HALVES,
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

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@kernel_memory("native_layer_norm", "_fused_rms_norm")
def forward(call: Call) -> Steps:
    """A contiguous input and weights."""
    yield from contiguous_copies(call.args[0], *call.args[2:-1])
    yield OUTPUTS


@kernel_memory("native_layer_norm_backward", "_fused_rms_norm_backward")
def backward(call: Call) -> Steps:
    """Contiguous inputs, and weight gradients in two passes for many short rows."""
    # The kernel's host code copies the gradient after it has allocated the outputs. The
    # last argument tells which gradients are wanted; an RMS norm has no bias.
    grad, tensor, shape = call.args[:3]
    _, gamma, *beta = call.args[-1]
    weights = call.args[5 if beta else 4 : -1]
    columns = prod(shape)
    rows = tensor.numel() // max(columns, 1)
    yield from contiguous_copies(tensor, *weights)
    yield OUTPUTS
    yield from contiguous_copies(grad)
    yield from scratch(
        "norm_backward", rows, columns, tensor.element_size(), gamma, any(beta)
    )


@kernel_memory("_weight_norm_interface")
def weight_norm(call: Call) -> Steps:
    """Norms in the strides of the scale; a scale of another size: not represented."""
    direction, scale, norms = call.args[0], call.args[1], call.out[1]
    if direction.shape[call.get(2, 0)] != scale.numel():
        yield Unverified()
    steps = zip(scale.shape, scale.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    yield Output(0)
    yield Output(1, size_bytes=extent * norms.element_size() if norms.numel() else 0)


@kernel_memory("native_group_norm")
def group_norm(call: Call) -> Steps:
    """A scale and a shift for each channel of each sample."""
    tensor, gamma, beta, samples, channels, _, groups = call.args[:7]
    number = max(tensor.element_size(), SINGLE_BYTES)
    if tensor.element_size() < SINGLE_BYTES:
        yield buffer(samples * groups * SINGLE_BYTES)
        yield buffer(samples * groups * SINGLE_BYTES)
    if gamma is not None or beta is not None:
        yield buffer(samples * channels * number)
        yield buffer(samples * channels * number)


@kernel_memory("native_group_norm_backward")
def group_norm_backward(call: Call) -> Steps:
    """Sums for each channel and for each group of each sample."""
    _, tensor, _, _, gamma, samples, channels, _, groups, mask = call.args
    number = max(tensor.element_size(), SINGLE_BYTES)
    yield OUTPUTS
    yield buffer(samples * channels * number)
    yield buffer(samples * channels * number)
    if mask[0]:
        yield buffer(samples * groups * number)
        yield buffer(samples * groups * number)
        if gamma is not None:
            yield buffer(samples * channels * number)


def channels_last(tensor: Tensor) -> bool:
    """Return whether channels are the innermost dimension, or could be."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is not None and tensor.is_contiguous(memory_format=last):
        return True
    return tensor.is_contiguous() and tensor.stride(1) == 1


def indexed_by_32_bits(tensor: Tensor) -> bool:
    """Return whether kernels with 32-bit indices reach every element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return max(tensor.numel(), last) < MAX_INDEX


def layout_of(tensor: Tensor) -> Literal["contiguous", "channels last", "general"]:
    """Return the layout of [samples, channels, ...] that selects the kernels."""
    if not indexed_by_32_bits(tensor):
        return "general"
    if tensor.is_contiguous():
        return "channels last" if tensor.stride(1) == 1 else "contiguous"
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    return "channels last" if last else "general"


@kernel_memory("native_batch_norm")
def batch_norm(call: Call) -> Steps:
    """Training statistics in channels-last format, or of strides of any kind."""
    tensor, weight, bias, _, _, train = call.args[:6]
    layout, channels = layout_of(tensor), tensor.shape[1]
    yield OUTPUTS
    if train and layout == "channels last":
        rows = tensor.numel() // max(channels, 1)
        yield from freed_at_once(*scratch("batch_norm_statistics", rows, channels, 4))
    if train and layout == "general":
        yield from _mean_and_variance(tensor, call.out[1].dtype)
    if layout == "general":
        for parameter in (weight, bias):
            if parameter is None:
                yield buffer(call.out[1].element_size())


def _mean_and_variance(tensor: Tensor, dtype: torch.dtype) -> Steps:
    """Welford's algorithm over all dimensions but the channels, in fp32."""
    data = Layout.of(tensor)
    copies = []
    if tensor.dtype not in (dtype, torch.float16):  # those of fp16 are read as such
        copies.append(copy_of(tensor, dtype.itemsize))
        data = Layout.cast(tensor, dtype)
    dims = [d for d in range(tensor.dim()) if d != 1]
    yield from freed_at_once(*copies, *welford(data, dims, dtype))


@kernel_memory("native_batch_norm_backward", "batch_norm_backward")
def batch_norm_backward(call: Call) -> Steps:
    """Sums of the gradient, in one kernel with the input's gradient where possible."""
    grad, tensor, weight, mean, var, saved, _, train, _, mask = call.args[:10]
    image, gamma, beta = (
        Output(k, size_bytes=None if wanted else 0) for k, wanted in enumerate(mask)
    )
    needs_sums = train or mask[1] or mask[2]
    small = indexed_by_32_bits(tensor) and indexed_by_32_bits(grad)
    if needs_sums and mask[0] and not channels_last(tensor) and small:
        yield from _reshaped(tensor, grad)
        yield from (image, gamma, beta)
        return
    if not saved.numel():  # evaluation, without statistics of the forward
        statistics = torch.float32 if tensor.dtype in HALVES else tensor.dtype
        if needs_sums and mean.dtype != statistics:
            yield copy_of(mean, statistics.itemsize)
        yield copy_of(var, statistics.itemsize)
    if needs_sums:
        yield from _sums_of_gradient(call, gamma, beta)
    both = {layout_of(tensor), layout_of(grad)}
    if mask[0] and train and weight is None and (len(both) > 1 or "general" in both):
        yield buffer(saved.element_size())
    yield image


def _sums_of_gradient(call: Call, *parameters: Output) -> Steps:
    """Sums for each channel, with a staging buffer in channels-last format."""
    grad, tensor, wanted = *call.args[:2], call.args[9][0]
    channels = tensor.shape[1]
    last = channels_last(tensor) and channels_last(grad) and indexed_by_32_bits(grad)
    copies = [] if last else _reshaped(tensor, grad)
    yield from copies
    number = max(tensor.element_size(), SINGLE_BYTES)
    if wanted or last:
        yield buffer(channels * number)
        yield buffer(channels * number)
    yield from parameters
    if last:
        rows = tensor.numel() // max(channels, 1)
        yield from freed_at_once(*scratch("batch_norm_statistics", rows, channels, 2))
    yield from map(Free, reversed(copies))


def _reshaped(*tensors: Tensor) -> list[KernelScratch[int]]:
    """Return the copies that [samples, channels, all else] needs."""
    return [copy_of(x) for x in tensors if x.dim() > 3 and not flattens(x[0, 0])]  # noqa: PLR2004
