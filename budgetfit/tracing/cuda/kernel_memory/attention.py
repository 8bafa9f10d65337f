"""Fused attention, with copies of its inputs.

Sources: ``attention.cu`` and ``attention_backward.cu`` in
``aten/src/ATen/native/transformers/cuda``, and ``mem_eff_attention/kernel_forward.h``
(``kNeedsOutputAccumulatorBuffer``).
"""

from math import prod

import torch
from torch import Tensor
from torch._prims_common import check_contiguous_sizes_strides

from budgetfit.core.step_trace import KernelScratch
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
    freed_at_once,
    kernel_memory,
    scratch,
)
from budgetfit.tracing.records import Free, Output

CUDNN_ATTENTION = Unverified(
    "attention runs in cuDNN on this card: of its workspace only what cudnn-frontend "
    "asks for is in the prediction"
)
EFFICIENT_REGISTER_HEAD_DIM = 128
# From this version on, seed and offset are on the GPU where there is no dropout.
SEED_ON_GPU_VERSION = (2, 14)


@kernel_memory("_scaled_dot_product_flash_attention")
def flash_forward(call: Call) -> Steps:
    """Partial results of split keys (split-KV)."""
    query, key = call.args[:2]
    batch, heads, length, head_dim = query.shape
    dropout = bool(call.get(3, call.kwargs.get("dropout_p", 0.0)))
    yield from scratch(
        "flash_attention_forward",
        batch * heads,
        length,
        key.shape[2],
        head_dim,
        dropout,
    )


def _contiguous_by_length(tensor: Tensor) -> bool:
    """Return whether [batch, heads, length, width] is contiguous with length first."""
    both = (tensor.shape, tensor.stride())
    shape, strides = ([each[k] for k in (0, 2, 1, 3)] for each in both)
    return bool(check_contiguous_sizes_strides(shape, strides))


@kernel_memory("_scaled_dot_product_flash_attention_backward")
def flash_backward(call: Call) -> Steps:
    """grad_out, query, key, value, out: [batch, heads, length, head dimension]."""
    grad, query, key, _, out = call.args[:5]
    for tensor in (grad, out):
        if not _contiguous_by_length(tensor):
            yield copy_of(tensor)
    yield OUTPUTS
    batch, heads, length, head_dim = query.shape
    yield from scratch(
        "flash_attention_backward",
        batch * heads,
        length,
        key.shape[2],
        head_dim,
        query.element_size(),
        key.shape[1] != heads,
    )


def _launches(tensor: Tensor, element_bytes: int = 0) -> tuple[KernelScratch[int], ...]:
    """Return what the launches of a kernel take for their samples of a tensor.

    The first of several, a later one of several, the only one, and the first of any.
    """
    samples = tensor.shape[0]
    each = tensor.numel() // max(samples, 1)
    element_bytes = element_bytes or tensor.element_size()
    return scratch("efficient_attention_launches", samples, each * element_bytes)


@kernel_memory("_scaled_dot_product_efficient_attention")
def efficient_forward(call: Call) -> Steps:
    """Philox seed and offset come first, if they are on the GPU."""
    # Wide heads are summed in fp32 outside of registers, where the output has 16 bits.
    # Many samples take several launches, which have outputs of their own: the first
    # one's stay until the op ends.
    query, _, value = call.args[:3]
    dropout, version = call.get(5, 0.0), call.target.torch_version
    on_gpu = not dropout and version >= SEED_ON_GPU_VERSION
    for position in (2, 3):
        yield Output(position, size_bytes=None if on_gpu else 0)
    own = [_launches(out) for out in call.out[:2]]
    wide = max(query.shape[-1], value.shape[-1]) > EFFICIENT_REGISTER_HEAD_DIM
    sums = _launches(call.out[0], SINGLE_BYTES)[:3]
    if not (wide and query.dtype in HALVES):
        sums = ()
    yield from (first for first, *_ in own)
    yield from freed_at_once(*sums[:1])
    yield OUTPUTS
    later = [after for _, after, *_ in own]
    yield from later
    yield from freed_at_once(*sums[1:])
    yield from map(Free, later)


@kernel_memory("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(call: Call) -> Steps:
    """grad_out, query, key, value: [batch, heads, length, head dimension]."""
    # delta is the row sum of grad x out; 16-bit kernels compute it without a product.
    # Many samples take several launches with gradients of their own, of which the first
    # has the most samples.
    grad, query, key, value, bias = call.args[:5]
    dropout, mask = call.args[9:11]
    samples, heads, length, head_dim = query.shape
    own = [query, key, value, *((bias,) if bias is not None and mask[3] else ())]
    copies = () if _contiguous_by_length(grad) else _launches(grad)
    yield from copies[2:3]
    yield OUTPUTS  # the gradients of query, key, value and bias
    yield from copies[:1]
    yield from (_launches(each)[0] for each in own)

    def of_launch(numbers: int, element_bytes: int) -> KernelScratch[int]:
        each = numbers * element_bytes
        return scratch("efficient_attention_launches", samples, each)[3]

    if key.shape[1] != heads:  # one for each head of the query, then summed
        for shared in (key, value):
            numbers = heads * shared.shape[2] * shared.shape[3]
            yield of_launch(numbers, shared.element_size())
    single = query.dtype == torch.float32
    delta = of_launch(heads * length, SINGLE_BYTES)
    if single:
        product = _launches(grad, SINGLE_BYTES)[3]
        yield product
        if heads > 1 and length > 1:
            total = of_launch(heads * length, SINGLE_BYTES)
            yield total
            yield delta  # contiguous as [batch, heads, length]
            yield Free(total)
        else:
            yield delta
        yield Free(product)
    else:
        yield delta
    yield from scratch(
        "efficient_attention_backward",
        samples * heads,
        heads,
        length,
        key.shape[2],
        head_dim,
        value.shape[3],
        single,
        dropout > 0,
    )
    yield Free(delta)


@kernel_memory("_scaled_dot_product_cudnn_attention")
def cudnn_forward(_call: Call) -> Steps:
    """No workspace is known."""
    yield CUDNN_ATTENTION


@kernel_memory("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(call: Call) -> Steps:
    """grad_out, query, key, value: [batch, heads, length, head dimension].

    One workspace with the row sums of grad x out, an fp32 gradient of the query and,
    for grouped heads, gradients of keys and values for each head of the query. What
    cuDNN itself adds can only be measured on a GPU.

    Source: ``CompositeSDPABackwardNode`` in NVIDIA/cudnn-frontend,
    ``node/scaled_dot_product_flash_attention.h``.
    """
    yield CUDNN_ATTENTION
    _, query, key, value = call.args[:4]
    batch, heads, length, head_dim = query.shape
    size_bytes = batch * heads * length * (1 + head_dim) * SINGLE_BYTES
    for shared in (key, value):
        if shared.shape[1] != heads:
            numbers = batch * heads * shared.shape[2] * shared.shape[3]
            size_bytes += numbers * shared.element_size()
    yield buffer(size_bytes)


@kernel_memory("_safe_softmax")
def safe_softmax(call: Call) -> Steps:
    """The mask of minus infinity, the fully masked rows, and a zero for them."""
    # Source: ``aten/src/ATen/native/transformers/attention.cpp``.
    tensor, dim = call.args[:2]
    last = dim % max(tensor.dim(), 1)
    rows = prod(size for d, size in enumerate(tensor.shape) if d != last)
    yield OUTPUTS
    yield from freed_at_once(*contiguous_copies(tensor))
    yield buffer(tensor.numel())
    yield buffer(rows)
    yield buffer(call.out.element_size())
