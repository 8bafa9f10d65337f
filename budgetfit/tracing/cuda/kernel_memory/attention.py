"""Scratch of fused attention, copies of its inputs included.

Source: ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``; rules M26 and
M27 of cuda-memory.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._prims_common import check_contiguous_sizes_strides

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Born,
    Give,
    InnerStep,
    Kwargs,
    Scratch,
    Take,
    buffer,
    copy_of,
    in_steps,
    scratch,
    temporary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

DELTA_BYTES = 4  # fp32


@temporary("_scaled_dot_product_flash_attention")
def flash_forward(args: Args, kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Results of each part of the keys, where they are split."""
    query, key = args[:2]
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)  # noqa: PLR2004
    batch, heads, length, head_dim = query.shape
    yield scratch(
        "flash_attention_forward",
        batch * heads,
        length,
        key.shape[2],
        head_dim,
        bool(dropout),
    )


def _contiguous_by_length(tensor: Tensor) -> bool:
    """Say whether [batch, heads, length, width] lies as [batch, length, ...]."""
    batch, heads, length, width = tensor.shape
    by_batch, by_head, by_length, by_width = tensor.stride()
    return bool(
        check_contiguous_sizes_strides(
            (batch, length, heads, width), (by_batch, by_length, by_head, by_width)
        )
    )


@temporary("_scaled_dot_product_flash_attention_backward")
def flash_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """grad_out, query, key, value, out: [batch, heads, length, head dimension]."""
    grad, query, key, _, out = args[:5]
    for tensor in (grad, out):
        if not _contiguous_by_length(tensor):
            yield copy_of(tensor, when="before")
    batch, heads, length, head_dim = query.shape
    yield scratch(
        "flash_attention_backward",
        batch * heads,
        length,
        key.shape[2],
        head_dim,
        query.element_size(),
        key.shape[1] != heads,
    )


@in_steps("_scaled_dot_product_efficient_attention")
def efficient_forward(
    _args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[InnerStep]:
    """Seed and offset are made first, where they are on the card."""
    yield from (Born(2), Born(3))


@in_steps("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[InnerStep]:
    """grad_out, query, key, value: [batch, heads, length, head dimension].

    delta is the sum of grad x out; the kernels for 16 bits compute it themselves.
    """
    grad, query, key, value = args[:4]
    dropout = args[9]
    if not _contiguous_by_length(grad):
        yield Take(copy_of(grad))
    batch, heads, length, head_dim = query.shape
    yield from (Born(output) for output in range(4))  # of query, key, value and bias
    if key.shape[1] != heads:  # first for each head of the query, then summed
        for shared in (key, value):
            numbers = batch * heads * shared.shape[2] * shared.shape[3]
            yield Take(buffer(numbers * shared.element_size()))
    single = query.dtype == torch.float32
    delta = Take(buffer(batch * heads * length * DELTA_BYTES))
    if single:
        product = Take(buffer(grad.numel() * DELTA_BYTES))
        yield product
        if heads > 1 and length > 1:
            total = Take(delta.scratch)
            yield total
            yield delta  # transposed to [batch, heads, length]
            yield Give(total)
        else:
            yield delta
        yield Give(product)
    else:
        yield delta
    workspace = scratch(
        "efficient_attention_backward",
        batch * heads,
        length,
        key.shape[2],
        head_dim,
        value.shape[3],
        single,
        dropout > 0,
    )
    yield Take(workspace)
    yield Give(delta)


@temporary("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """grad_out, query, key, value: [batch, heads, length, head dimension].

    One workspace with the row sums of grad x out, an fp32 gradient of the query and,
    for grouped heads, gradients of keys and values for each head of the query. What
    cuDNN itself adds to it only a card can tell (M29).

    Source: ``CompositeSDPABackwardNode`` in NVIDIA/cudnn-frontend,
    ``node/scaled_dot_product_flash_attention.h``.
    """
    _, query, key, value = args[:4]
    batch, heads, length, head_dim = query.shape
    size_bytes = batch * heads * length * (1 + head_dim) * DELTA_BYTES
    for shared in (key, value):
        if shared.shape[1] != heads:
            numbers = batch * heads * shared.shape[2] * shared.shape[3]
            size_bytes += numbers * shared.element_size()
    yield buffer(size_bytes)


@in_steps("_safe_softmax")
def safe_softmax(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[InnerStep]:
    """The mask of what is minus infinity, its rows, and a zero for them.

    Source: ``aten/src/ATen/native/transformers/attention.cpp``.
    """
    tensor, dim = args[:2]
    yield Born(0)
    if not tensor.is_contiguous():
        copy = Take(copy_of(tensor))
        yield from (copy, Give(copy))
    yield Take(buffer(tensor.numel()))
    yield Take(buffer(tensor.numel() // max(tensor.shape[dim], 1)))
    yield Take(buffer(out.element_size()))
