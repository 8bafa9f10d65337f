"""Scratch memory of fused attention, with copies of its inputs.

Source: ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._prims_common import check_contiguous_sizes_strides

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Alloc,
    Args,
    Free,
    KernelStep,
    Kwargs,
    Output,
    Scratch,
    buffer,
    copy_of,
    register_scratch,
    register_steps,
    scratch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

DELTA_BYTES = 4  # fp32


@register_scratch("_scaled_dot_product_flash_attention")
def flash_forward(args: Args, kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """Partial results of split keys (split-KV)."""
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
    """Return whether [batch, heads, length, width] is contiguous with length first."""
    batch, heads, length, width = tensor.shape
    by_batch, by_head, by_length, by_width = tensor.stride()
    return bool(
        check_contiguous_sizes_strides(
            (batch, length, heads, width), (by_batch, by_length, by_head, by_width)
        )
    )


@register_scratch("_scaled_dot_product_flash_attention_backward")
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


@register_steps("_scaled_dot_product_efficient_attention")
def efficient_forward(
    _args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[KernelStep]:
    """Philox seed and offset come first, if they are on the GPU."""
    yield from (Output(2), Output(3))


@register_steps("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(
    args: Args, _kwargs: Kwargs, _out: object
) -> Iterator[KernelStep]:
    """grad_out, query, key, value: [batch, heads, length, head dimension].

    delta is the row sum of grad x out; 16-bit kernels compute it without a product.
    """
    grad, query, key, value = args[:4]
    dropout = args[9]
    if not _contiguous_by_length(grad):
        yield Alloc(copy_of(grad))
    batch, heads, length, head_dim = query.shape
    yield from (Output(output) for output in range(4))  # of query, key, value and bias
    if key.shape[1] != heads:  # one for each head of the query, then summed
        for shared in (key, value):
            numbers = batch * heads * shared.shape[2] * shared.shape[3]
            yield Alloc(buffer(numbers * shared.element_size()))
    single = query.dtype == torch.float32
    delta = Alloc(buffer(batch * heads * length * DELTA_BYTES))
    if single:
        product = Alloc(buffer(grad.numel() * DELTA_BYTES))
        yield product
        if heads > 1 and length > 1:
            total = Alloc(delta.scratch)
            yield total
            yield delta  # contiguous as [batch, heads, length]
            yield Free(total)
        else:
            yield delta
        yield Free(product)
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
    yield Alloc(workspace)
    yield Free(delta)


@register_scratch("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """grad_out, query, key, value: [batch, heads, length, head dimension].

    One workspace with the row sums of grad x out, an fp32 gradient of the query and,
    for grouped heads, gradients of keys and values for each head of the query. What
    cuDNN itself adds can only be measured on a GPU.

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


@register_steps("_safe_softmax")
def safe_softmax(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[KernelStep]:
    """The mask of minus infinity, the fully masked rows, and a zero for them.

    Source: ``aten/src/ATen/native/transformers/attention.cpp``.
    """
    tensor, dim = args[:2]
    yield Output(0)
    if not tensor.is_contiguous():
        copy = Alloc(copy_of(tensor))
        yield from (copy, Free(copy))
    yield Alloc(buffer(tensor.numel()))
    yield Alloc(buffer(tensor.numel() // max(tensor.shape[dim], 1)))
    yield Alloc(buffer(out.element_size()))
