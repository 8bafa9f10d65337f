"""Convolutions without cuDNN: plain, dilated, transposed, grouped and depthwise."""

import random
from collections.abc import Iterator

import torch

from tests.accuracy.op_level.op_layouts import FLOATS, Case, seeded, tensor

KINDS = ("plain", "dilated", "grouped", "depthwise", "wide depthwise", "transposed")


def image(
    rng: random.Random, shape: list[int], dtype: torch.dtype, odd: float = 0.3
) -> torch.Tensor:
    """Return samples of channels: contiguous, or with the channels last."""
    if rng.random() >= odd:
        return tensor(shape, dtype)
    _, channels, *sides = shape
    stride, step = [0] * len(shape), channels
    for dim in reversed(range(2, len(shape))):
        stride[dim] = step
        step *= sides[dim - 2]
    stride[0], stride[1] = step, 1
    return tensor(shape, dtype, stride)


def every_convolution() -> Iterator[Case]:
    """One to three dimensions, forward and backward, plain or with channels last."""
    rng = seeded(21)
    for kind in KINDS:
        for number in range(24):
            yield from _pair(rng, kind, (1, 2, 2, 3)[number % 4])


def _pair(rng: random.Random, kind: str, dims: int) -> Iterator[Case]:
    dtype = rng.choice(FLOATS)
    transposed = kind == "transposed"
    groups = rng.choice((1, 3)) if transposed else 1
    groups = rng.choice((2, 4)) if kind == "grouped" else groups
    inputs, outputs = groups * rng.choice((1, 8, 40)), groups * rng.choice((4, 40))
    if "depthwise" in kind:
        groups = inputs = rng.choice((3, 32, 64))
        outputs = inputs * (2 if "wide" in kind else 1)
    kernel, stride = rng.choice((1, 3, 4)), rng.choice((1, 1, 2))
    padding = rng.choice((0, kernel // 2))
    dilation = 2 if kind == "dilated" else 1
    extra = stride - 1 if transposed else 0
    samples = rng.choice((1, 2, 5))
    side = {1: rng.choice((50, 3000)), 2: rng.choice((14, 56)), 3: 9}[dims]
    reach = dilation * (kernel - 1)
    if transposed:
        size = (side - 1) * stride - 2 * padding + reach + extra + 1
    else:
        size = (side + 2 * padding - reach - 1) // stride + 1
    x = image(rng, [samples, inputs, *[side] * dims], dtype)
    shape = [inputs, outputs // groups] if transposed else [outputs, inputs // groups]
    weight = image(rng, [*shape, *[kernel] * dims], dtype, 0.2)
    bias = tensor([outputs], dtype) if rng.random() < 0.5 else None
    rest = [
        [stride] * dims,
        [padding] * dims,
        [dilation] * dims,
        transposed,
        [extra] * dims,
        groups,
    ]
    yield "convolution", [x, weight, bias, *rest], {}
    grad = image(rng, [samples, outputs, *[size] * dims], dtype)
    sizes = None if bias is None else [outputs]
    mask = [rng.random() < 0.7, rng.random() < 0.9, bias is not None]
    if any(mask):
        yield "convolution_backward", [grad, x, weight, sizes, *rest, mask], {}
