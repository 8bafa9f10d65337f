"""Scratch of batch normalization without cuDNN.

Contiguous images take nothing. Where the channels are neighbours, thread blocks share a
channel through a staging buffer; volumes that lie so are not represented. Source:
``Normalization.cuh`` (``batch_norm_stats_channels_last_cuda_template``) and
``Normalization.cu`` (``batch_norm_choose_impl``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Born,
    Give,
    InnerStep,
    Kwargs,
    Scratch,
    Take,
    buffer,
    in_steps,
    scratch,
    temporary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

Layout = Literal["contiguous", "channels last", "general"]
STATISTIC_BYTES = 4


def layout_of(tensor: Tensor) -> Layout:
    """Return which kernels serve a tensor of [samples, channels, ...]."""
    if tensor.is_contiguous():
        return "channels last" if tensor.stride(1) == 1 else "contiguous"
    if tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels last"
    return "general"


@temporary("native_batch_norm")
def forward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Statistics of training where the channels come last."""
    tensor, train = args[0], args[5]
    if train and layout_of(tensor) == "channels last":
        channels = tensor.shape[1]
        yield scratch("batch_norm_statistics", tensor.numel() // channels, channels, 4)


@in_steps("native_batch_norm_backward")
def backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[InnerStep]:
    """Sums of the gradient, staged ones where the channels come last."""
    grad, tensor, weight = args[:3]
    if layout_of(tensor) == "contiguous":
        return
    channels = tensor.shape[1]
    for _ in range(2):
        yield Take(buffer(channels * STATISTIC_BYTES))
    yield from (Born(1), Born(2))
    if layout_of(tensor) == layout_of(grad) == "channels last":
        rows = tensor.numel() // channels
        staged = Take(scratch("batch_norm_statistics", rows, channels, 2))
        yield from (staged, Give(staged))
    elif weight is None:
        yield Take(buffer(STATISTIC_BYTES))
    yield Born(0)
