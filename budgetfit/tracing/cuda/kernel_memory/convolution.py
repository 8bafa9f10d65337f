"""What happens inside convolutions without cuDNN: copies, patches, one group at a time.

Each sample's patches are unfolded into columns and multiplied; groups run one after the
other on slices that are copied. Depthwise convolutions have kernels of their own. A
1-dimensional convolution is a 2-dimensional one of height 1. cuDNN's workspaces are
known to a card alone (M40) and are not represented.

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
    Input,
    reduction,
    vector,
)
from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Born,
    Give,
    InnerStep,
    Kwargs,
    Product,
    Take,
    buffer,
    in_steps,
    kept_output,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Kernel = Literal["plain", "dilated", "transposed", "depthwise"]
VOLUME = 3  # dimensions that a kernel of its own serves


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One call, forward or backward; ``outputs`` are the sizes of the output."""

    input: Tensor
    weight: Tensor
    bias: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int
    outputs: tuple[int, ...]

    @property
    def dims(self) -> int:
        """Of the image; 1 runs as 2."""
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
    def point(self) -> bool:
        """Whether patches are the image itself."""
        return (
            prod(self.weight.shape[2:]) == 1
            and max(self.stride) == 1
            and max(self.padding) == 0
            and max(self.dilation) == 1
        )

    def bytes_of(self, count: int) -> int:
        """Return the bytes of so many numbers."""
        return count * self.input.element_size()

    @property
    def columns(self) -> Take:
        """The patches of one sample in one group."""
        taps = prod(self.weight.shape[1:])  # channels of one group and places
        image = self.input.shape[2:] if self.transposed else self.outputs[2:]
        return Take(buffer(self.bytes_of(taps * prod(image))))

    def share(self, numbers: int) -> Take:
        """A tensor of one group."""
        return Take(buffer(self.bytes_of(numbers // self.groups)))


def copied(*tensors: Tensor) -> list[Take]:
    """Return contiguous copies of those that are not."""
    return [
        Take(buffer(t.numel() * t.element_size()))
        for t in tensors
        if not t.is_contiguous()
    ]


def sliced(tensor: Tensor, groups: int) -> Take | None:
    """Return the copy of one group's channels, None where they lie in one piece."""
    if tensor.shape[0] == 1 and tensor.is_contiguous():
        return None
    return Take(buffer(tensor.numel() // groups * tensor.element_size()))


@in_steps("convolution")
def convolution(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[InnerStep]:
    """Copies of what is not contiguous, then each group's output, then all of them."""
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
        outputs=tuple(out.shape),
    )
    yield from copied(tensor, weight)
    if call.kernel == "depthwise":
        return
    if groups == 1:
        yield from _forward(call, None)
        return
    for _ in range(groups):
        copy = sliced(tensor, groups) if tensor.is_contiguous() else None
        if copy is None and tensor.shape[0] > 1:
            copy = call.share(tensor.numel())
        if copy is not None:
            yield copy
        yield from _forward(call, call.share(_storage_numbers(call)))
        if copy is not None:
            yield Give(copy)
    yield Born(0)


def _forward(call: Convolution, result: Take | None) -> Iterator[InnerStep]:
    """One group: its output (the op's own without ``result``) and what it takes."""
    born: InnerStep = Born(0) if result is None else result
    inner: list[Take] = []
    if call.transposed and call.dims == VOLUME:
        old = call.share(call.input.numel())  # made for the output, and too small
        grows = prod(call.outputs) > call.input.numel()
        yield from (old, born, Give(old)) if grows else (born,)
    else:
        yield born
    if call.kernel != "plain" or not call.point:
        inner.append(call.columns)
    if call.transposed and call.bias:  # ones, to add the bias by a product
        inner.append(Take(buffer(call.bytes_of(prod(call.outputs[2:])))))
    yield from inner
    yield Product()
    yield from (Give(take) for take in reversed(inner))


@kept_output("convolution")
def kept_input_size(args: Args, _kwargs: Kwargs, out: Tensor) -> int:
    """Transposed in 3-D: the output's storage was made in the size of the input."""
    tensor, transposed, groups = args[0], args[6], args[8]
    numbers = out.numel()
    if transposed and tensor.dim() == VOLUME + 2 and groups == 1:
        numbers = max(numbers, tensor.numel())
    return int(numbers) * out.element_size()


def _storage_numbers(call: Convolution) -> int:
    """Return how many numbers the outputs of all groups are stored with."""
    numbers = prod(call.outputs)
    if call.transposed and call.dims == VOLUME:
        return max(numbers, call.input.numel())
    return numbers


def bias_sum(call: Convolution, shape: tuple[int, ...], dims: list[int]) -> Take:
    """Return the scratch of summing a contiguous gradient for the bias."""
    dtype = call.input.dtype
    return Take(
        reduction(
            Input.contiguous(dtype, shape),
            dims,
            input_vector=vector(dtype),
            out_dtype=dtype,
        )
    )
