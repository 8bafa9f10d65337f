"""Scratch memory of layer, RMS and group normalization.

Sources: ``layer_norm_kernel.cu`` and ``group_norm_kernel.cu`` in
``aten/src/ATen/native/cuda``.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Kwargs,
    Scratch,
    buffer,
    contiguous_copies,
    register_scratch,
    scratch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

STATISTIC_BYTES = 4  # kept in fp32, whatever the input (fp64 is not trained)


@register_scratch("native_layer_norm", "_fused_rms_norm")
def forward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A contiguous input."""
    yield from contiguous_copies(args[0], when="before")


@register_scratch("native_layer_norm_backward")
def layer_norm_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Contiguous inputs, and weight gradients in two passes for many short rows.

    The kernel's host code copies the gradient after it has allocated the outputs.
    """
    grad, tensor, shape = args[:3]
    mask = args[7]
    yield from contiguous_copies(tensor, when="before")
    yield from contiguous_copies(grad)
    yield _norm_backward(tensor, shape, gamma=mask[1], beta=mask[2])


@register_scratch("_fused_rms_norm_backward")
def rms_norm_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """As ``layer_norm_backward``, without a bias."""
    grad, tensor, shape = args[:3]
    yield from contiguous_copies(tensor, when="before")
    yield from contiguous_copies(grad)
    yield _norm_backward(tensor, shape, gamma=args[5][1], beta=False)


def _norm_backward(
    tensor: Tensor, shape: list[int], *, gamma: bool, beta: bool
) -> Scratch:
    columns = prod(shape)
    rows = tensor.numel() // max(columns, 1)
    return scratch("norm_backward", rows, columns, tensor.element_size(), gamma, beta)


@register_scratch("native_group_norm")
def group_norm(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A scale and a shift for each channel of each sample."""
    tensor, gamma, beta, samples, channels, _, groups = args[:7]
    if tensor.element_size() < STATISTIC_BYTES:
        yield buffer(samples * groups * STATISTIC_BYTES)
        yield buffer(samples * groups * STATISTIC_BYTES)
    if gamma is not None or beta is not None:
        yield buffer(samples * channels * STATISTIC_BYTES)
        yield buffer(samples * channels * STATISTIC_BYTES)


@register_scratch("native_group_norm_backward")
def group_norm_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Sums for each channel and for each group of each sample."""
    grad, tensor, _, _, gamma, samples, channels, _, groups, mask = args
    yield from contiguous_copies(grad, tensor, when="before")
    yield buffer(samples * channels * STATISTIC_BYTES)
    yield buffer(samples * channels * STATISTIC_BYTES)
    if mask[0]:
        yield buffer(samples * groups * STATISTIC_BYTES)
        yield buffer(samples * groups * STATISTIC_BYTES)
        if gamma is not None:
            yield buffer(samples * channels * STATISTIC_BYTES)
