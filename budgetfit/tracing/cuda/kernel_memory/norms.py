"""Layer, RMS, group and batch normalization; the latter without cuDNN.

In channels-last format thread blocks of a batch norm share a channel through a staging
buffer; 3-D images in that format are not represented. Sources: ``layer_norm_kernel.cu``
and ``group_norm_kernel.cu`` in ``aten/src/ATen/native/cuda``, ``Normalization.cuh``
(``batch_norm_stats_channels_last_cuda_template``) and ``Normalization.cu``
(``batch_norm_choose_impl``).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal

import torch

from budgetfit.tracing.cuda.kernel_memory.registry import (
    OUTPUTS,
    SINGLE_BYTES,
    Call,
    Steps,
    Unverified,
    buffer,
    contiguous_copies,
    freed_at_once,
    kernel_memory,
    scratch,
)
from budgetfit.tracing.records import Output

if TYPE_CHECKING:
    from torch import Tensor

VOLUME = 5  # dimensions of a batch of 3-D images


@kernel_memory("native_layer_norm", "_fused_rms_norm")
def forward(call: Call) -> Steps:
    """A contiguous input."""
    yield from contiguous_copies(call.args[0])
    yield OUTPUTS


@kernel_memory("native_layer_norm_backward", "_fused_rms_norm_backward")
def backward(call: Call) -> Steps:
    """Contiguous inputs, and weight gradients in two passes for many short rows.

    The kernel's host code copies the gradient after it has allocated the outputs. The
    last argument tells which gradients are wanted; an RMS norm has no bias.
    """
    grad, tensor, shape = call.args[:3]
    _, gamma, *beta = call.args[-1]
    columns = prod(shape)
    rows = tensor.numel() // max(columns, 1)
    yield from contiguous_copies(tensor)
    yield OUTPUTS
    yield from contiguous_copies(grad)
    yield from scratch(
        "norm_backward", rows, columns, tensor.element_size(), gamma, any(beta)
    )


@kernel_memory("native_group_norm")
def group_norm(call: Call) -> Steps:
    """A scale and a shift for each channel of each sample."""
    tensor, gamma, beta, samples, channels, _, groups = call.args[:7]
    if tensor.element_size() < SINGLE_BYTES:
        yield buffer(samples * groups * SINGLE_BYTES)
        yield buffer(samples * groups * SINGLE_BYTES)
    if gamma is not None or beta is not None:
        yield buffer(samples * channels * SINGLE_BYTES)
        yield buffer(samples * channels * SINGLE_BYTES)


@kernel_memory("native_group_norm_backward")
def group_norm_backward(call: Call) -> Steps:
    """Sums for each channel and for each group of each sample."""
    grad, tensor, _, _, gamma, samples, channels, _, groups, mask = call.args
    yield from contiguous_copies(grad, tensor)
    yield OUTPUTS
    yield buffer(samples * channels * SINGLE_BYTES)
    yield buffer(samples * channels * SINGLE_BYTES)
    if mask[0]:
        yield buffer(samples * groups * SINGLE_BYTES)
        yield buffer(samples * groups * SINGLE_BYTES)
        if gamma is not None:
            yield buffer(samples * channels * SINGLE_BYTES)


def layout_of(tensor: Tensor) -> Literal["contiguous", "channels last", "general"]:
    """Return the layout of [samples, channels, ...] that selects the kernels."""
    if tensor.is_contiguous():
        return "channels last" if tensor.stride(1) == 1 else "contiguous"
    if tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels last"
    return "general"


def _unverified(tensor: Tensor) -> list[Unverified]:
    general = tensor.dim() == VOLUME and not tensor.is_contiguous()
    return [Unverified()] if general else []


@kernel_memory("native_batch_norm")
def batch_norm(call: Call) -> Steps:
    """Training statistics in channels-last format."""
    tensor, train = call.args[0], call.args[5]
    yield from _unverified(tensor)
    if train and layout_of(tensor) == "channels last":
        channels = tensor.shape[1]
        rows = tensor.numel() // channels
        yield from scratch("batch_norm_statistics", rows, channels, 4)


@kernel_memory("native_batch_norm_backward")
def batch_norm_backward(call: Call) -> Steps:
    """Sums of the gradient, with a staging buffer in channels-last format."""
    grad, tensor, weight = call.args[:3]
    yield from _unverified(grad)
    if layout_of(tensor) == "contiguous":
        return
    channels = tensor.shape[1]
    yield buffer(channels * SINGLE_BYTES)
    yield buffer(channels * SINGLE_BYTES)
    yield Output(1)
    yield Output(2)
    if layout_of(tensor) == layout_of(grad) == "channels last":
        rows = tensor.numel() // channels
        yield from freed_at_once(*scratch("batch_norm_statistics", rows, channels, 2))
    elif weight is None:
        yield buffer(SINGLE_BYTES)
    yield OUTPUTS
