"""The calls that are recorded: random shapes and layouts, the same on every run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.accuracy.op_level.op_call import contiguous

Case = tuple[str, list[Any], dict[str, Any]]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
META = torch.device("meta")


def tensor(
    shape: list[int],
    dtype: torch.dtype = torch.float32,
    stride: list[int] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """Return a tensor without memory."""
    stride = contiguous(shape) if stride is None else stride
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    whole = torch.empty(extent, dtype=dtype, device=META)
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


def sums() -> Iterator[Case]:
    """Sums and means of every layout."""
    rng = random.Random(1)
    for _ in range(400):
        dtype = rng.choice((*FLOATS, torch.float32, torch.int64, torch.bool))
        whole = layout(rng, dtype, rng.randint(1, 4), 2**24)
        op = rng.choice(("sum.dim_IntList", "sum.default", "mean.dim", "mean.default"))
        if not dtype.is_floating_point:
            op = op.replace("mean", "sum").replace("sum.dim", "sum.dim_IntList")[:15]
            op = "sum.dim_IntList" if "dim" in op else "sum.default"
        if "default" in op:
            yield op, [whole], {}
            continue
        dims = rng.sample(range(whole.dim()), rng.randint(1, whole.dim()))
        yield op, [whole, dims, rng.random() < 0.5], {}


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {"sums": sums}


def softmaxes() -> Iterator[Case]:
    """Backward of softmax and log_softmax along any dimension."""
    rng = random.Random(2)
    for _ in range(60):
        dtype = rng.choice(FLOATS)
        grad = layout(rng, dtype, rng.randint(1, 4), 2**20)
        shape = list(grad.shape)
        out = tensor(shape, dtype) if rng.random() < 0.7 else grad
        if rng.random() < 0.5:
            grad = tensor(shape, dtype)
        op = rng.choice(("_softmax_backward_data", "_log_softmax_backward_data"))
        yield op, [grad, out, rng.randrange(len(shape)), dtype], {}
    for op in ("_softmax_backward_data", "_log_softmax_backward_data"):
        grad = tensor([8, 12, 128, 128])
        yield op, [grad, grad, 3, torch.float16], {}


def norms() -> Iterator[Case]:
    """Backward of layer_norm and rms_norm."""
    rng = random.Random(3)
    for _ in range(80):
        dtype = rng.choice(FLOATS)
        columns = rng.choice((64, 100, 256, 768, 1024, 4096))
        rows = rng.choice((8, 8192, 65536, 65537, 70000, 131072, 262144))
        if rows * columns > 2**28:
            rows = 1024
        x = tensor([2, rows // 2, columns], dtype)
        if rng.random() < 0.2:
            x = tensor([2, rows // 2, columns], dtype, [columns, 2 * columns, 1])
        grad = tensor([2, rows // 2, columns], dtype)
        if rng.random() < 0.3:
            grad = tensor([2, rows // 2, columns], dtype, [columns, 2 * columns, 1])
        half = dtype != torch.float32
        stats = tensor([2, rows // 2, 1], torch.float32)
        weight = tensor([columns], dtype)
        mask = [rng.random() < 0.8 for _ in range(3)]
        if rng.random() < 0.5:
            args = [grad, x, [columns], stats, stats, weight, weight, mask]
            yield "native_layer_norm_backward", args, {}
        else:
            args = [grad, x, [columns], stats, weight, mask[:2]]
            yield "_fused_rms_norm_backward", args, {}
        assert half in (True, False)


def embeddings() -> Iterator[Case]:
    """Backward of an embedding of any number of indices."""
    rng = random.Random(4)
    for _ in range(60):
        count = rng.choice((100, 3072, 3073, 8192, 5000, 100_000))
        rows = rng.choice((2, 512, 5000, 50257))
        columns = rng.choice((64, 768, 1000))
        dtype = rng.choice(FLOATS)
        index = rng.choice((torch.int64, torch.int32))
        grad = tensor([2, count // 2, columns], dtype)
        if rng.random() < 0.2:
            grad = tensor([2, count // 2, columns], dtype, [columns, 2 * columns, 1])
        if rng.random() < 0.1:
            grad = tensor([2, count // 2, columns], dtype, [0, columns, 1])
        padding = rng.choice((-1, 0))
        indices = tensor([2, count // 2], index)
        yield "embedding_dense_backward", [grad, indices, rows, padding, False], {}


def _heads(
    rng: random.Random, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return [batch, heads, length, width], often as a view of [batch, length, ...]."""
    batch, heads, length, width = shape
    if rng.random() < 0.3:
        return tensor(shape, dtype)
    step = heads * width
    return tensor(shape, dtype, [length * step, width, step, 1])


def attention() -> Iterator[Case]:
    """Backward of flash and of memory-efficient attention."""
    rng = random.Random(5)
    for _ in range(200):
        flash = rng.random() < 0.4
        dtype = rng.choice(FLOATS[1:] if flash else FLOATS)
        batch, heads = rng.choice((1, 2, 5, 40)), rng.choice((1, 8, 12))
        width = rng.choice((8, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256))
        length = rng.choice((1, 100, 197, 512, 1000))
        keys = rng.choice((length, length, 77, 300))
        few = rng.choice((heads, 4)) if flash and heads % 4 == 0 else heads
        shape = [batch, heads, length, width]
        query = _heads(rng, shape, dtype)
        key = _heads(rng, [batch, few, keys, width], dtype)
        value = _heads(rng, [batch, few, keys, width], dtype)
        grad = _heads(rng, shape, dtype)
        out = _heads(random.Random(1), shape, dtype)
        drop = rng.choice((0.0, 0.1))
        seed = torch.zeros((), dtype=torch.int64)  # on the host outside CUDA graphs
        if flash:
            lse = tensor([batch, heads, length])
            seed = tensor([2], torch.uint64)
            rest = [None, None, length, keys, drop, True, seed, tensor([], torch.uint64)]
            args = [grad, query, key, value, out, lse, *rest]
            yield "_scaled_dot_product_flash_attention_backward", args, {}
            continue
        lse = tensor([batch, heads, -(-length // 32) * 32])
        rest = [drop, [True, True, True, False], False]
        args = [grad, query, key, value, None, out, lse, seed, seed, *rest]
        yield "_scaled_dot_product_efficient_attention_backward", args, {}


FAMILIES |= {
    "softmaxes": softmaxes,
    "norms": norms,
    "embeddings": embeddings,
    "attention": attention,
}
