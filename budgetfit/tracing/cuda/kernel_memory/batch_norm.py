"""Scratch memory of batch normalization without cuDNN.

None for contiguous images. In channels-last format thread blocks share a channel
through a staging buffer; 3-D images in that format are not represented. Source:
``Normalization.cuh`` (``batch_norm_stats_channels_last_cuda_template``) and
``Normalization.cu`` (``batch_norm_choose_impl``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Alloc,
    Args,
    Free,
    KernelStep,
    Kwargs,
    Output,
    Scratch,
    buffer,
    register_scratch,
    register_steps,
    scratch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

Layout = Literal["contiguous", "channels last", "general"]
STATISTIC_BYTES = 4


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of [samples, channels, ...] that selects the kernels."""
    if tensor.is_contiguous():
        return "channels last" if tensor.stride(1) == 1 else "contiguous"
    if tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels last"
    return "general"


@register_scratch("native_batch_norm")
def forward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Training statistics in channels-last format."""
    tensor, train = args[0], args[5]
    if train and layout_of(tensor) == "channels last":
        channels = tensor.shape[1]
        yield scratch("batch_norm_statistics", tensor.numel() // channels, channels, 4)


@register_steps("native_batch_norm_backward")
def backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[KernelStep]:
    """Sums of the gradient, with a staging buffer in channels-last format."""
    grad, tensor, weight = args[:3]
    if layout_of(tensor) == "contiguous":
        return
    channels = tensor.shape[1]
    for _ in range(2):
        yield Alloc(buffer(channels * STATISTIC_BYTES))
    yield from (Output(1), Output(2))
    if layout_of(tensor) == layout_of(grad) == "channels last":
        rows = tensor.numel() // channels
        staged = Alloc(scratch("batch_norm_statistics", rows, channels, 2))
        yield from (staged, Free(staged))
    elif weight is None:
        yield Alloc(buffer(STATISTIC_BYTES))
    yield Output(0)
