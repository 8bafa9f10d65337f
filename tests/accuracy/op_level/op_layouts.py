"""Random shapes and layouts, the same on every run."""

import random
from typing import Any

import torch

from tests.accuracy.op_level.op_call import contiguous

Case = tuple[str, list[Any], dict[str, Any]]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
META = torch.device("meta")


def seeded(seed: int | str) -> random.Random:
    """Return the same stream of choices on every run."""
    return random.Random(seed)


def tensor(
    shape: list[int],
    dtype: torch.dtype = torch.float32,
    stride: list[int] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """Return a tensor without memory."""
    stride = contiguous(shape) if stride is None else stride
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    whole = torch.empty(max(extent, 0), dtype=dtype, device=META)
    return whole.as_strided(shape, stride, offset)


def size(rng: random.Random, most: int) -> int:
    """Return a size: round numbers more often than others."""
    number = int(2 ** rng.uniform(0, most.bit_length() - 1))
    step = rng.choice((1, 1, 2, 4, 8, 64, 128, 768))
    return max(1, min(most, -(-number // step) * step))


def layout(
    rng: random.Random, dtype: torch.dtype, ndim: int, most: int
) -> torch.Tensor:
    """Return a tensor of a random layout: permuted, sliced, expanded or plain."""
    shape = [1] * ndim
    for dim in rng.sample(range(ndim), ndim):
        shape[dim] = size(rng, max(1, most // max(1, torch.Size(shape).numel())))
    order = list(range(ndim))
    kind = rng.choice(("plain", "plain", "permuted", "sliced", "expanded", "both"))
    if kind in ("permuted", "both"):
        rng.shuffle(order)
    whole = [shape[dim] for dim in order]
    start = [0] * ndim
    if kind in ("sliced", "both"):
        dim = rng.randrange(ndim)
        whole[dim] *= rng.choice((2, 3))
        start[dim] = rng.choice((0, whole[dim] // 3))
    strides = contiguous(whole)
    offset = sum(a * b for a, b in zip(start, strides, strict=True))
    stride = [0] * ndim
    for place, dim in enumerate(order):
        stride[dim] = strides[place]
    if kind == "expanded":
        stride[rng.randrange(ndim)] = 0
        offset = 0
    return tensor(shape, dtype, stride, offset)


def matrix(rng: random.Random, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Return a matrix or batch: plain, permuted, with holes, or expanded."""
    order = list(range(len(shape)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    whole = [shape[dim] for dim in order]
    hole = rng.choice((1, 1, 1, 2))
    strides = [step * hole for step in contiguous(whole)]
    stride = [0] * len(shape)
    for place, dim in enumerate(order):
        stride[dim] = strides[place]
    if rng.random() < 0.1:
        stride[rng.randrange(len(shape))] = 0
    return tensor(shape, dtype, stride)


def heads_of(rng: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return [batch, heads, length, width], often as a view of [batch, length, ...]."""
    _, heads, length, width = shape
    if rng.random() < 0.3:
        return tensor(shape, dtype)
    step = heads * width
    return tensor(shape, dtype, [length * step, width, step, 1])
