"""Image ops: contiguous copies in pooling, padding and upsampling.

Sources: ``UpSample*.cu``, ``*Pool*.cu``, ``ReflectionPad.cu`` and
``TensorTransformations.cu`` in ``aten/src/ATen/native/cuda``.
"""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from budgetfit.core.step_trace import KernelScratch
from budgetfit.tracing.cuda.kernel_memory.registry import (
    OUTPUTS,
    Call,
    Steps,
    contiguous_copies,
    copy_of,
    kernel_memory,
    resized,
)

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
MIN_LAST_CHANNELS = 4
MAX_POOL_3D = torch.ops.aten.max_pool3d_with_indices_backward.default


def _format_of(tensor: Tensor) -> torch.memory_format:
    """Return the memory format that a kernel uses for this input."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.is_contiguous():
        return torch.contiguous_format
    is_last = tensor.is_contiguous(memory_format=last)
    suggested = suggest_memory_format(tensor) == last  # not so where a batch is 1
    return last if is_last and suggested else torch.contiguous_format


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a kernel takes this input as one in channels-last format."""
    return _format_of(tensor) != torch.contiguous_format


@kernel_memory("upsample_bilinear2d_backward", "upsample_trilinear3d_backward")
def upsample_backward(call: Call) -> Steps:
    """A contiguous gradient, unless the size is unchanged; ``UpSample*.cu``."""
    grad, out = call.args[0], call.out
    last = _format_of(grad) != torch.contiguous_format
    if grad.shape != out.shape and not (last and out.shape[1] >= MIN_LAST_CHANNELS):
        yield from contiguous_copies(*((out, grad) if last else (grad,)))


@kernel_memory(
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest2d_backward",
    "_upsample_nearest_exact2d_backward",
)
def upsample_nearest(call: Call) -> Steps:
    """Contiguous input and output, unless channels-last with 4 or more channels."""
    tensor, out = call.args[0], call.out
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    if tensor.shape != out.shape and not (
        last and tensor.shape[1] >= MIN_LAST_CHANNELS
    ):
        yield from contiguous_copies(out, tensor)


@kernel_memory(
    "avg_pool2d_backward",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
)
def pool_backward(call: Call) -> Steps:
    """The input, the gradient and indices, in the memory format of the input."""
    grad, tensor, last = call.args[0], call.args[1], call.args[-1]
    wanted = _format_of(tensor)
    indices = (last,) if isinstance(last, torch.Tensor) else ()
    read_input = () if call.func is MAX_POOL_3D else (tensor,)
    for read in (*read_input, grad, *indices):
        if not read.is_contiguous(memory_format=wanted):
            yield copy_of(read)


@kernel_memory("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool_backward(call: Call) -> Steps:
    """A contiguous gradient, except in channels-last format."""
    if _format_of(call.args[1]) == torch.contiguous_format:
        yield from contiguous_copies(call.args[0])


@kernel_memory("adaptive_max_pool2d", "adaptive_max_pool2d_backward")
def adaptive_max_pool(call: Call) -> Steps:
    """Contiguous copies of the outputs and of the input, or gradient."""
    outputs = [call.out] if isinstance(call.out, torch.Tensor) else call.out
    indices = call.args[2:3]  # of the backward
    yield from contiguous_copies(*outputs, call.args[0], *indices)


@kernel_memory(
    "_adaptive_avg_pool3d_backward",
    "avg_pool3d",
    "avg_pool3d_backward",
    "reflection_pad1d",
    "reflection_pad1d_backward",
    "reflection_pad2d",
    "reflection_pad2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_linear1d_backward",
    "upsample_nearest1d",
    "upsample_nearest1d_backward",
)
def contiguous_input(call: Call) -> Steps:
    """A contiguous input, or gradient."""
    yield from contiguous_copies(call.args[0])


@kernel_memory("_adaptive_avg_pool3d")
def contiguous_input_first(call: Call) -> Steps:
    """A contiguous input, allocated before the output."""
    yield from contiguous_copies(call.args[0])
    yield OUTPUTS


def _dense_copies(tensor: Tensor) -> list[KernelScratch[int]]:
    """Return a copy if a tensor is contiguous in none of the memory formats."""
    general = _format_of(tensor) == torch.contiguous_format
    return contiguous_copies(tensor) if general else []


@kernel_memory("avg_pool2d", "max_pool2d_with_indices", "max_pool3d_with_indices")
def pool(call: Call) -> Steps:
    """An input that is contiguous in one of the memory formats."""
    yield from _dense_copies(call.args[0])


@kernel_memory("_adaptive_avg_pool2d")
def adaptive_avg_pool(call: Call) -> Steps:
    """An input that is contiguous in one of the memory formats, before the output."""
    yield from _dense_copies(call.args[0])
    yield OUTPUTS


@kernel_memory("roll")
def roll(call: Call) -> Steps:
    """One dimension after the other, or a copy; ``TensorTransformations.cu``."""
    if len(call.args[1]) > 1 or not call.args[0].is_contiguous():
        yield copy_of(call.args[0])
    yield OUTPUTS


@kernel_memory("col2im", "im2col")
def fold(call: Call) -> Steps:
    """An output in the input's size, resized only where it must be larger.

    So a smaller output keeps a storage as large as the input. ``Col2Im.cu``.
    """
    copies = contiguous_copies(call.args[0])
    first, *then = resized(call.args[0], call.out)
    yield from (first, *copies, *then)
