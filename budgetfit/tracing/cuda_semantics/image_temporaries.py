"""Scratch of image ops: contiguous gradients of poolings, paddings and resizings.

Sources: ``UpSample*.cu``, ``*Pool*.cu``, ``ReflectionPad.cu`` and
``TensorTransformations.cu`` in ``aten/src/ATen/native/cuda``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from budgetfit.tracing.cuda_semantics.scratch_registry import (
    Args,
    Kwargs,
    Scratch,
    contiguous_copies,
    copy_of,
    temporary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@temporary(
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_nearest2d_backward",
    "upsample_linear1d_backward",
    "upsample_trilinear3d_backward",
)
def upsample_backward(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """A contiguous gradient, unless the size stays; ``UpSample*.cu``."""
    if args[0].shape != out.shape:
        yield from contiguous_copies(args[0])


@temporary(
    "adaptive_max_pool2d_backward",
    "avg_pool2d_backward",
    "max_pool2d_with_indices_backward",
    "reflection_pad2d_backward",
    "replication_pad2d_backward",
)
def pool_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A gradient that is contiguous, as an image of either memory format."""
    grad = args[0]
    if not (
        grad.is_contiguous() or (grad.dim() == IMAGE_DIMS and _channels_last(grad))
    ):
        yield copy_of(grad)


IMAGE_DIMS = 4


def _channels_last(tensor: Tensor) -> bool:
    return bool(tensor.is_contiguous(memory_format=torch.channels_last))


@temporary("roll")
def roll(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """One dimension after the other; ``TensorTransformations.cu``."""
    if len(args[1]) > 1:
        yield copy_of(args[0], when="before")
