"""Calls whose scratch is far larger than their results: means, medians, distances."""

import random
from collections.abc import Iterator

import torch

from tests.accuracy.op_level.op_layouts import FLOATS, Case, layout, seeded, tensor

REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")
POWERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf"))
WIDE = (torch.float32, torch.float64)
KEYS = (*FLOATS, torch.float64, torch.int64, torch.int32, torch.uint8)


def selections() -> Iterator[Case]:
    """Every reduction and norm, of every layout."""
    rng = seeded(71)
    for _ in range(40):
        yield from _scattered_means(rng)
        x = layout(rng, rng.choice(KEYS), rng.randint(1, 3), 2**18)
        yield "median.default", [x], {}
        yield "nanmedian.default", [x], {}
        yield "nanmedian.dim", [x, rng.randrange(x.dim())], {}
        dtype, norm, width = (
            rng.choice(WIDE),
            rng.choice(POWERS),
            rng.choice((1, 3, 64)),
        )
        rows, others = rng.choice((1, 2, 50, 700)), rng.choice((1, 2, 50, 700))
        batch = rng.choice(([], [1], [3]))
        one = tensor([*batch, rows, width], dtype)
        other = tensor([*batch, others, width], dtype)
        if rng.random() < 0.3:
            one = tensor([*batch, width, rows], dtype).mT
        apart = tensor([*batch, rows, others], dtype)
        grad = rng.choice((apart, tensor([*batch, 1, 1], dtype).expand_as(apart)))
        yield "_cdist_backward", [grad, one, other, norm, apart], {}
        yield "_euclidean_dist", [one, other], {}
        points = tensor([min(rows, 300), width], dtype)
        pairs = tensor([points.shape[0] * (points.shape[0] - 1) // 2], dtype)
        yield "_pdist_forward", [points, norm], {}
        yield "_pdist_backward", [pairs, points, norm, pairs], {}
        kinds = rng.choice(((torch.float32, torch.float64), (torch.int64, torch.int32)))
        values = layout(rng, rng.choice(kinds), 2, 2**15)
        bounds = tensor([50], rng.choice(kinds))
        yield "searchsorted.Tensor", [bounds, values], {}
        ids = layout(rng, rng.choice(kinds), rng.randint(1, 3), 2**15)
        tests = tensor([rng.choice((1, 5, 9))], ids.dtype)
        yield "isin.Tensor_Tensor", [ids, tests], {}


def _scattered_means(rng: random.Random) -> Iterator[Case]:
    dtype = rng.choice((*KEYS[:4], torch.int64))
    rows, count = rng.choice((1, 100, 3000)), rng.choice((1, 60, 5000))
    x = layout(rng, dtype, 2, 2**17)
    source = tensor([count, x.shape[1]], dtype)
    if rng.random() < 0.3:
        source = tensor([x.shape[1], count], dtype).t()
    index = tensor([min(count, rows), x.shape[1]], torch.int64)
    named = {"include_self": rng.random() < 0.5}
    reduce = rng.choice((*REDUCTIONS, "mean"))
    yield "scatter_reduce.two", [x, 0, index, source, reduce], named
    into = tensor(list(x.shape), dtype)
    yield "scatter_reduce_.two", [into, 0, index, source, reduce], named
    reduce = rng.choice((*REDUCTIONS[1:], "mean"))
    one = tensor([count], torch.int64)
    yield "index_reduce", [x, 0, one, source, reduce], named
    yield "index_reduce_", [into, 0, one, source, reduce], named
