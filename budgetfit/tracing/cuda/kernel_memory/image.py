"""Scratch memory of image ops: contiguous copies in pooling, padding and upsampling.

Sources: ``UpSample*.cu``, ``*Pool*.cu``, ``ReflectionPad.cu`` and
``TensorTransformations.cu`` in ``aten/src/ATen/native/cuda``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Kwargs,
    Scratch,
    contiguous_copies,
    copy_of,
    register_scratch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def _format_of(tensor: Tensor) -> torch.memory_format:
    """Return the memory format that a kernel uses for this input."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.is_contiguous():
        return torch.contiguous_format
    is_last = tensor.is_contiguous(memory_format=last)
    return last if is_last else torch.contiguous_format


def _in_format(like: Tensor, *tensors: Tensor) -> Iterator[Scratch]:
    """Copies of the tensors that do not have the memory format of ``like``."""
    wanted = _format_of(like)
    return (copy_of(t) for t in tensors if not t.is_contiguous(memory_format=wanted))


@register_scratch(
    "upsample_bilinear2d_backward",
    "upsample_linear1d_backward",
    "upsample_trilinear3d_backward",
)
def upsample_backward(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """A contiguous gradient, unless the size is unchanged; ``UpSample*.cu``."""
    last = _format_of(args[0]) != torch.contiguous_format
    if args[0].shape != out.shape and not (last and out.shape[1] >= MIN_LAST_CHANNELS):
        if last:
            yield from contiguous_copies(out)
        yield from contiguous_copies(args[0])


@register_scratch("upsample_bicubic2d_backward")
def bicubic_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A contiguous gradient."""
    yield from contiguous_copies(args[0])


@register_scratch(
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest2d_backward",
    "_upsample_nearest_exact2d_backward",
)
def upsample_nearest(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Contiguous input and output, unless channels-last with 4 or more channels."""
    tensor = args[0]
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    if tensor.shape == out.shape or (last and tensor.shape[1] >= MIN_LAST_CHANNELS):
        return
    yield from contiguous_copies(out)
    yield from contiguous_copies(tensor)


@register_scratch("avg_pool2d_backward")
def avg_pool_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A gradient in the memory format of the input."""
    yield from _in_format(args[1], args[0])


@register_scratch(
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"
)
def max_pool_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A gradient and indices in the memory format of the input."""
    yield from _in_format(args[1], args[0], args[-1])


@register_scratch("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[Scratch]:
    """A contiguous gradient, except in channels-last format."""
    if _format_of(args[1]) == torch.contiguous_format:
        yield from contiguous_copies(args[0])


@register_scratch("adaptive_max_pool2d")
def adaptive_max_pool(
    args: Args, _kwargs: Kwargs, out: tuple[Tensor, Tensor]
) -> Iterator[Scratch]:
    """Contiguous copies of input and outputs."""
    yield from contiguous_copies(*out, args[0])


@register_scratch("adaptive_max_pool2d_backward")
def adaptive_max_pool_backward(
    args: Args, _kwargs: Kwargs, out: Tensor
) -> Iterator[Scratch]:
    """Contiguous copies of the gradients."""
    yield from contiguous_copies(out, args[0])


@register_scratch("avg_pool3d", "reflection_pad2d", "im2col")
def contiguous_input(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A contiguous input."""
    yield from contiguous_copies(args[0])


@register_scratch("_adaptive_avg_pool3d")
def contiguous_input_before(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[Scratch]:
    """A contiguous input, allocated before the output."""
    yield from contiguous_copies(args[0], when="before")


@register_scratch(
    "_adaptive_avg_pool3d_backward",
    "avg_pool3d_backward",
    "reflection_pad2d_backward",
)
def contiguous_gradient(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A contiguous gradient."""
    yield from contiguous_copies(args[0])


@register_scratch("replication_pad2d_backward")
def pad_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A gradient that is contiguous in one of the memory formats."""
    grad = args[0]
    if not (grad.is_contiguous() or _format_of(grad) != torch.contiguous_format):
        yield copy_of(grad)


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
MIN_LAST_CHANNELS = 4


@register_scratch("roll")
def roll(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """One dimension after the other; ``TensorTransformations.cu``."""
    if len(args[1]) > 1:
        yield copy_of(args[0], when="before")
