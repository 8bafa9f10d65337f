"""Scratch memory inside convolutions without cuDNN: copies, im2col columns, groups.

Each sample is unfolded into columns and multiplied; groups run one after the other on
copied slices. Depthwise convolutions have their own kernels. A 1-D convolution is a 2-D
one of height 1. cuDNN's workspaces depend on the GPU's choice of algorithm and are not
represented.

Sources: ``native/Convolution.cpp`` (``_convolution``, ``convolution_backward``), and in
``native/cuda``: ``ConvolutionMM2d.cu``, ``NaiveDilatedConvolution.cu``,
``NaiveConvolutionTranspose2d.cu`` and ``...3d.cu``, ``DepthwiseConv2d.cu`` and
``...3d.cu``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from budgetfit.tracing.cuda.kernel_memory.reduction import (
    InputLayout,
    input_vec_size,
    reduction,
)
from budgetfit.tracing.cuda.kernel_memory.registry import (
    Alloc,
    Args,
    Free,
    Gemm,
    KernelStep,
    Kwargs,
    Output,
    buffer,
    register_output_bytes,
    register_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Kernel = Literal["plain", "dilated", "transposed", "depthwise"]
VOLUME = 3  # spatial dimensions with a separate kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution call, forward or backward."""

    input: Tensor
    weight: Tensor
    bias: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int
    output_shape: tuple[int, ...]

    @property
    def dims(self) -> int:
        """Spatial dimensions; 1 runs as 2."""
        return self.input.dim() - 2

    @property
    def kernel(self) -> Kernel:
        """Which implementation runs (``_select_conv_backend``)."""
        channels = self.input.shape[1]
        if self.transposed:
            return "transposed"
        if self.groups == channels > 1 and self.weight.shape[0] % channels == 0:
            return "depthwise"
        dilated = self.dims == VOLUME or max(self.dilation) > 1
        return "dilated" if dilated else "plain"

    @property
    def is_pointwise(self) -> bool:
        """Whether the columns are the image itself (1x1 kernel)."""
        return (
            prod(self.weight.shape[2:]) == 1
            and max(self.stride) == 1
            and max(self.padding) == 0
            and max(self.dilation) == 1
        )

    def bytes_of(self, count: int) -> int:
        """Return the bytes of ``count`` elements."""
        return count * self.input.element_size()

    @property
    def columns(self) -> Alloc:
        """The im2col columns of one sample in one group."""
        taps = prod(self.weight.shape[1:])  # channels of one group x kernel size
        image = self.input.shape[2:] if self.transposed else self.output_shape[2:]
        return Alloc(buffer(self.bytes_of(taps * prod(image))))

    def group_share(self, numbers: int) -> Alloc:
        """Allocate one group's share of a tensor."""
        return Alloc(buffer(self.bytes_of(numbers // self.groups)))


def contiguous_allocs(*tensors: Tensor) -> list[Alloc]:
    """Return contiguous copies of the tensors that are not contiguous."""
    return [
        Alloc(buffer(t.numel() * t.element_size()))
        for t in tensors
        if not t.is_contiguous()
    ]


def group_slice(tensor: Tensor, groups: int) -> Alloc | None:
    """Return the copy of one group's channels; None if they are contiguous."""
    if tensor.shape[0] == 1 and tensor.is_contiguous():
        return None
    return Alloc(buffer(tensor.numel() // groups * tensor.element_size()))


@register_steps("convolution")
def convolution(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[KernelStep]:
    """Contiguous copies, then the output of each group, then the joined output."""
    tensor, weight, bias, stride, padding, dilation, transposed, _, groups = args[:9]
    call = Convolution(
        input=tensor,
        weight=weight,
        bias=bias is not None,
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        transposed=transposed,
        groups=groups,
        output_shape=tuple(out.shape),
    )
    yield from contiguous_allocs(tensor, weight)
    if call.kernel == "depthwise":
        return
    if groups == 1:
        yield from _forward(call, None)
        return
    for _ in range(groups):
        copy = group_slice(tensor, groups) if tensor.is_contiguous() else None
        if copy is None and tensor.shape[0] > 1:
            copy = call.group_share(tensor.numel())
        if copy is not None:
            yield copy
        yield from _forward(call, call.group_share(_storage_numbers(call)))
        if copy is not None:
            yield Free(copy)
    yield Output(0)


def _forward(call: Convolution, result: Alloc | None) -> Iterator[KernelStep]:
    """One group: its output (the op's without ``result``) and scratch memory."""
    output: KernelStep = Output(0) if result is None else result
    inner: list[Alloc] = []
    if call.transposed and call.dims == VOLUME:
        old = call.group_share(
            call.input.numel()
        )  # allocated for the output, and too small
        grows = prod(call.output_shape) > call.input.numel()
        yield from (old, output, Free(old)) if grows else (output,)
    else:
        yield output
    if call.kernel != "plain" or not call.is_pointwise:
        inner.append(call.columns)
    if call.transposed and call.bias:  # ones, to add the bias by a product
        inner.append(Alloc(buffer(call.bytes_of(prod(call.output_shape[2:])))))
    yield from inner
    yield Gemm()
    yield from (Free(alloc) for alloc in reversed(inner))


@register_output_bytes("convolution")
def kept_input_size(args: Args, _kwargs: Kwargs, out: Tensor) -> int:
    """Transposed in 3-D: the output's storage is at least as large as the input."""
    tensor, transposed, groups = args[0], args[6], args[8]
    numbers = out.numel()
    if transposed and tensor.dim() == VOLUME + 2 and groups == 1:
        numbers = max(numbers, tensor.numel())
    return int(numbers) * out.element_size()


def _storage_numbers(call: Convolution) -> int:
    """Return the elements of the storages of all groups' outputs."""
    numbers = prod(call.output_shape)
    if call.transposed and call.dims == VOLUME:
        return max(numbers, call.input.numel())
    return numbers


def bias_sum(call: Convolution, shape: tuple[int, ...], dims: list[int]) -> Alloc:
    """Return the scratch memory of summing a contiguous gradient for the bias."""
    dtype = call.input.dtype
    return Alloc(
        reduction(
            InputLayout.contiguous(dtype, shape),
            dims,
            input_vector=input_vec_size(dtype),
            out_dtype=dtype,
        )
    )
