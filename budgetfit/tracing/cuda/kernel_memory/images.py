"""Image ops: contiguous copies in pooling, padding and upsampling.

Sources: ``UpSample*.cu``, ``*Pool*.cu``, ``ReflectionPad.cu`` and
``TensorTransformations.cu`` in ``aten/src/ATen/native/cuda``.
"""

from math import prod

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from budgetfit.tracing.cuda.kernel_memory.registry import (
    OUTPUTS,
    Call,
    Gemm,
    Steps,
    Unverified,
    buffer,
    contiguous_copies,
    copy_of,
    freed_at_once,
    kernel_memory,
    resized,
)

MIN_LAST_CHANNELS = 4
MAX_POOL_3D = torch.ops.aten.max_pool3d_with_indices_backward.default


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a kernel takes this input as one in channels-last format."""
    return suggest_memory_format(tensor) != torch.contiguous_format


@kernel_memory(
    "upsample_bilinear2d_backward",
    "upsample_nearest2d",
    "upsample_nearest2d_backward",
    "upsample_nearest3d",
    "upsample_trilinear3d_backward",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact2d_backward",
    "_upsample_nearest_exact3d",
)
def upsample(call: Call) -> Steps:
    """Contiguous input and output, unless the size is unchanged; ``UpSample*.cu``."""
    # In 2-D four channels and more may be last, in 3-D not.
    tensor, out = call.args[0], call.out
    if tensor.shape == out.shape:
        return
    is_2d = tensor.dim() == 4  # noqa: PLR2004
    if is_2d and tensor.shape[1] >= MIN_LAST_CHANNELS and is_channels_last(tensor):
        if not tensor.is_contiguous(memory_format=torch.channels_last):
            yield copy_of(tensor)
    else:
        yield from contiguous_copies(out, tensor)


@kernel_memory(
    "avg_pool2d_backward",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
)
def pool_backward(call: Call) -> Steps:
    """The input, the gradient and indices, in the memory format of the input."""
    grad, tensor, last = call.args[0], call.args[1], call.args[-1]
    wanted = suggest_memory_format(tensor)
    indices = (last,) if isinstance(last, torch.Tensor) else ()
    read_input = () if call.func is MAX_POOL_3D else (tensor,)
    for read in (*read_input, grad, *indices):
        if not read.is_contiguous(memory_format=wanted):
            yield copy_of(read)


@kernel_memory("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool_backward(call: Call) -> Steps:
    """A contiguous gradient, except in channels-last format."""
    if not is_channels_last(call.args[1]):
        yield from contiguous_copies(call.args[0])


@kernel_memory("adaptive_max_pool2d")
def adaptive_max_pool(call: Call) -> Steps:
    """Contiguous copies of the outputs and, with a batch dimension, of the input."""
    batched = call.args[0].dim() == 4  # noqa: PLR2004
    yield from contiguous_copies(*call.out, *call.args[:batched])


@kernel_memory("adaptive_max_pool2d_backward")
def adaptive_max_pool_backward(call: Call) -> Steps:
    """Contiguous copies of both gradients and of the indices."""
    grad, _, indices = call.args
    yield from contiguous_copies(call.out, grad, indices)


@kernel_memory("avg_pool2d", "max_pool2d_with_indices", "max_pool3d_with_indices")
def pool(call: Call) -> Steps:
    """An input that is contiguous in one of the memory formats."""
    tensor = call.args[0]
    if not tensor.is_contiguous(memory_format=suggest_memory_format(tensor)):
        yield copy_of(tensor)


@kernel_memory("_adaptive_avg_pool2d")
def adaptive_avg_pool(call: Call) -> Steps:
    """A contiguous input, before the output, except in channels-last format."""
    if not is_channels_last(call.args[0]):
        yield from contiguous_copies(call.args[0])
    yield OUTPUTS


@kernel_memory("roll")
def roll(call: Call) -> Steps:
    """One dimension after the other, or a copy; ``TensorTransformations.cu``."""
    if len(call.args[1]) > 1 or not call.args[0].is_contiguous():
        yield copy_of(call.args[0])
    yield OUTPUTS


@kernel_memory("affine_grid_generator")
def affine_grid(call: Call) -> Steps:
    """Positions in every direction, and the grid of them that theta multiplies."""
    # Source: ``native/AffineGridGenerator.cpp``.
    theta, (samples, _, *sides), align_corners = call.args
    yield buffer(samples * prod(sides) * theta.shape[-1] * theta.element_size())
    for side in reversed(sides):
        count = 1 if align_corners or side == 1 else 3  # then scaled and divided
        yield from freed_at_once(*[buffer(side * theta.element_size())] * count)
    yield OUTPUTS
    if not theta.is_contiguous():
        yield Unverified()
    yield Gemm()


@kernel_memory("col2im", "im2col")
def fold(call: Call) -> Steps:
    """An output in the input's size, resized only where it must be larger."""
    # So a smaller output keeps a storage as large as the input. ``Col2Im.cu``.
    copies = contiguous_copies(call.args[0])
    first, *then = resized(call.args[0], call.out)
    yield from (first, *copies, *then)
