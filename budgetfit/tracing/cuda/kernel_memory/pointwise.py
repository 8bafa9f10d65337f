"""Scratch memory of pointwise ops: casts to a common dtype, scalars as tensors.

Sources: ``TensorCompare.cpp`` (``where``, ``isinf``), ``Pow.cpp`` and
``Distributions.cu`` in ``aten/src/ATen/native``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Kwargs,
    Scratch,
    buffer,
    copy_of,
    register_scratch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

NUMBER_BYTES = 8
SINGLE_BYTES = 4


@register_scratch("where.self")
def where(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Casts to the dtype of the result."""
    for tensor in args[1:3]:
        if tensor.dtype != out.dtype:
            yield copy_of(tensor, out.element_size(), when="before")


@register_scratch("isinf")
def isinf(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Absolute values."""
    if args[0].is_floating_point():
        yield copy_of(args[0], when="before")


@register_scratch("pow.Scalar")
def pow_scalar(_args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """The base, as a tensor."""
    yield buffer(NUMBER_BYTES)


@register_scratch("bernoulli.default")
def bernoulli(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Probabilities in fp32, where they have 16 bits."""
    if args[0].dtype in (torch.float16, torch.bfloat16):
        yield copy_of(args[0], SINGLE_BYTES)
