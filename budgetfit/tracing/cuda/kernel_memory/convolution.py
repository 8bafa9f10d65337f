"""Convolutions without cuDNN: copies, im2col columns, groups; forward and backward.

Each sample is unfolded into columns and multiplied; groups run one after the other on
copied slices. Depthwise convolutions have their own kernels. A 1-D convolution is a 2-D
one of height 1. cuDNN's workspaces depend on the GPU's choice of algorithm; of those of
tensor cores an upper bound is represented.

Sources: ``native/Convolution.cpp`` (``_convolution``, ``convolution_backward``), and in
``native/cuda``: ``ConvolutionMM2d.cu``, ``NaiveDilatedConvolution.cu``,
``NaiveConvolutionTranspose2d.cu`` and ``...3d.cu``, ``DepthwiseConv2d.cu`` and
``...3d.cu``.
"""

from itertools import chain
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from budgetfit.core.step_trace import KernelScratch
from budgetfit.tracing.cuda.kernel_memory.reductions import Layout, reduction
from budgetfit.tracing.cuda.kernel_memory.registry import (
    OUTPUTS,
    Call,
    Gemm,
    KernelStep,
    Steps,
    Unverified,
    buffer,
    contiguous_copies,
    freed_at_once,
    kernel_memory,
)
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.records import Free, Output

VOLUME = 3  # spatial dimensions with a separate kernel
BIAS = 2  # its place among the gradients
CUDNN_CONVOLUTION = Unverified(
    "convolutions run in cuDNN on this card: its workspaces are not in the prediction, "
    "but for an upper bound of the copies that it makes of images with channels first"
)
# The step that allocates a gradient; empty where it is not needed.
Results = list[KernelStep]


class Convolution(NamedTuple):
    """The arguments of a convolution, forward or backward."""

    input: Tensor
    weight: Tensor
    bias: Any
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int
    output_shape: tuple[int, ...]

    @property
    def dims(self) -> int:
        """Spatial dimensions; 1 runs as 2."""
        return self.input.dim() - 2

    @property
    def kernel(self) -> Literal["plain", "dilated", "transposed", "depthwise"]:
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

    @property
    def is_patches(self) -> bool:
        """Whether windows of more than a pixel lie side by side."""
        windows = list(self.weight.shape[2:])
        return prod(windows) > 1 and windows == list(self.stride)

    @property
    def storage_numbers(self) -> int:
        """Elements of the output's storage: transposed in 3-D, at least the input's."""
        numbers = prod(self.output_shape)
        if self.transposed and self.dims == VOLUME:
            return max(numbers, self.input.numel())
        return numbers

    def numbers(self, count: int) -> KernelScratch[int]:
        """Return a buffer of ``count`` elements."""
        return buffer(count * self.input.element_size())

    def group_share(self, count: int) -> KernelScratch[int]:
        """Return a buffer for one group's share of ``count`` elements."""
        return self.numbers(count // self.groups)

    def columns(self) -> KernelScratch[int]:
        """Return the im2col columns of one sample in one group."""
        taps = prod(self.weight.shape[1:])  # channels of one group x kernel size
        image = self.input.shape[2:] if self.transposed else self.output_shape[2:]
        return self.numbers(taps * prod(image))

    def input_slice(self) -> list[KernelScratch[int]]:
        """Return the copy of one group's channels of the input, if it needs one."""
        several = self.input.shape[0] > 1
        return [self.group_share(self.input.numel())] if several else []

    def bias_sum(self, *shape: int, channels: int = 1) -> Steps:
        """Sum a contiguous gradient over all dimensions but that of the channels."""
        return _sum_but(channels, Layout.contiguous(self.input.dtype, shape))


def _sum_but(channels: int, grad: Layout) -> Steps:
    dims = [dim for dim in range(len(grad.shape)) if dim != channels]
    return freed_at_once(*reduction(grad, dims, grad.dtype))


@kernel_memory("convolution")
def convolution(call: Call) -> Steps:
    """Contiguous copies, then the output of each group, then the joined output."""
    conv = Convolution._make((*call.args[:9], call.out.shape))
    output = OUTPUTS
    if conv.groups == 1 and conv.storage_numbers > call.out.numel():
        size_bytes = conv.storage_numbers * call.out.element_size()
        output = Output(0, size_bytes=size_bytes)
    if call.target.cudnn:
        yield CUDNN_CONVOLUTION
        yield output
        return
    if conv.bias is not None and not conv.bias.is_contiguous():
        yield Unverified()
    contiguous = contiguous_copies(conv.input, conv.weight)
    yield from contiguous
    if conv.kernel == "depthwise":
        yield output
        if not contiguous:  # counted as a product, though the kernel has none
            yield Gemm()
    elif conv.groups == 1:
        yield from _forward(conv, output)
    else:
        parts = []
        for _ in range(conv.groups):
            copies, part = conv.input_slice(), conv.group_share(conv.storage_numbers)
            yield from copies
            yield from _forward(conv, part)
            yield from map(Free, copies)
            parts.append(part)
        yield output
        yield from map(Free, parts)


def _forward(conv: Convolution, output: KernelStep) -> Steps:
    """One group: its output and scratch memory."""
    size = conv.input.numel()
    if conv.transposed and conv.dims == VOLUME and prod(conv.output_shape) > size:
        too_small = conv.group_share(size)  # allocated for the output
        yield from (too_small, output, Free(too_small))
    else:
        yield output
    inner = []
    if conv.kernel != "plain" or not conv.is_pointwise:
        inner.append(conv.columns())
    if conv.transposed and conv.bias is not None:  # ones, to add it by a product
        inner.append(conv.numbers(prod(conv.output_shape[2:])))
    yield from inner
    yield Gemm()
    yield from map(Free, reversed(inner))


@kernel_memory("convolution_backward")
def convolution_backward(call: Call) -> Steps:
    """Gradients of the input, the weight and the bias, each if needed."""
    grad, mask = call.args[0], call.args[10]
    conv = Convolution._make((*call.args[1:10], grad.shape))
    if call.target.cudnn:
        yield CUDNN_CONVOLUTION
        yield from _cudnn_backward(conv, grad, mask, call.target)
        return
    outputs: list[Results] = [
        [Output(k)] if wanted else [] for k, wanted in enumerate(mask)
    ]
    if conv.kernel == "depthwise":
        yield from _depthwise(conv, grad, *outputs)
        return
    yield from contiguous_copies(conv.input, conv.weight)
    if conv.groups == 1:
        yield from _one_group(conv, grad, *outputs)
        return
    sizes = (conv.input.numel(), conv.weight.numel(), grad.shape[1])
    parts = []
    for _ in range(conv.groups):
        copies = conv.input_slice()
        if grad.shape[0] > 1 or not grad.is_contiguous():
            copies.insert(0, conv.group_share(grad.numel()))
        results: list[Results] = [
            [conv.group_share(size)] if wanted else []
            for size, wanted in zip(sizes, mask, strict=True)
        ]
        yield from copies
        yield from _one_group(conv, grad, *results)
        yield from map(Free, reversed(copies))
        parts.append(results)
    yield from chain(*outputs)
    for vector in reversed([*zip(*parts, strict=True)]):  # of C++, the last one first
        yield from map(Free, chain(*vector))


def _cudnn_backward(
    conv: Convolution, grad: Tensor, mask: list[bool], target: CudaTarget
) -> Steps:
    """Gradients of input and weight, each with a workspace; the bias is summed."""
    # Tensor cores want the channels last: images of another layout are copied. Two and
    # a half times their bytes is the least that covers ResNet-50 on an H100, bf16 and
    # TF32 (1.5 and 6.5 % more reserved than recorded; without, 15 and 11 % less), twice
    # is more than patches (ViT) and sequences (wav2vec2) took. The forward pass of none
    # took more than its outputs.
    first = (8, 0) if conv.input.dtype == torch.float32 else (7, 0)
    copied = (
        target.compute_capability >= first
        and conv.kernel != "depthwise"
        and conv.input.stride(1) != 1
    )
    both = conv.input.nbytes + grad.nbytes
    workspace = buffer(2 * both if conv.dims == 1 or conv.is_patches else 5 * both // 2)
    for number, wanted in enumerate(mask):
        if wanted:
            yield Output(number)
        if wanted and copied and number < BIAS:
            yield from freed_at_once(workspace)


def _one_group(conv: Convolution, grad: Tensor, *results: Results) -> Steps:
    channels = grad.shape[1] // conv.groups
    turned = not grad.is_contiguous()
    if conv.groups > 1:  # copied slices keep the memory format
        turned = turned and channels > 1 and grad.stride(1) == 1
    shape = (grad.shape[0], channels, *grad.shape[2:])
    copy = [conv.group_share(grad.numel())] if turned else []
    if conv.kernel == "transposed":
        yield from _transposed(conv, shape, copy, *results)
        return
    yield from copy
    steps = _plain if conv.kernel == "plain" else _dilated
    yield from steps(conv, shape, *results)
    yield from map(Free, copy)


def _plain(conv: Convolution, shape: tuple[int, ...], *results: Results) -> Steps:
    image, weight, bias = results
    columns = conv.columns()
    if image:
        yield from image
        yield columns
        yield Gemm()
    if bias:
        yield from bias
        yield from conv.bias_sum(*shape)
    if weight:
        yield from weight
        if not image:
            yield columns
        yield Gemm()
    if image or weight:
        yield Free(columns)


def _dilated(conv: Convolution, shape: tuple[int, ...], *results: Results) -> Steps:
    """The bias is summed sample by sample, with the same requests each time."""
    image, weight, bias = results
    yield from chain(*results)
    columns = [conv.columns()] if image or weight else []
    if columns:
        yield from columns
        yield Gemm()
    if bias:
        total = conv.numbers(shape[1])
        yield total
        yield from conv.bias_sum(*shape[1:], channels=0)
        yield Free(total)
    yield from map(Free, columns)


def _transposed(
    conv: Convolution,
    shape: tuple[int, ...],
    copy: list[KernelScratch[int]],
    *results: Results,
) -> Steps:
    """The input's gradient, then those of weight and bias, each with its own copy."""
    image, weight, bias = results
    columns = [] if conv.is_pointwise else [conv.columns()]
    frees = [Free(each) for each in (*columns, *copy)]
    if image:
        yield from chain(copy, image, columns)
        yield Gemm()
        yield from frees
    if weight or bias:
        yield from chain(weight, bias, copy, columns)
        if bias:
            yield from conv.bias_sum(*shape)
        yield Gemm()
        yield from frees


def _depthwise(
    conv: Convolution, grad: Tensor, image: Results, weight: Results, bias: Results
) -> Steps:
    """The weight's gradient is first, except in 3-D; a 1-D input is copied earlier."""
    copies = contiguous_copies(grad) if image or weight else []
    inputs = contiguous_copies(conv.input) if weight else []
    if conv.dims == 1:
        yield from contiguous_copies(conv.input)
        inputs = []
    if conv.dims == VOLUME:
        yield from chain(image, weight, copies, inputs)
        yield from map(Free, inputs)
    else:
        yield from chain(copies, inputs, weight)
        yield from map(Free, inputs)
        weights = contiguous_copies(conv.weight) if image else []
        yield from chain(image, weights)
        yield from map(Free, (*weights, *copies))
    if bias:
        yield from bias
        yield from _sum_but(1, Layout.of(grad))
