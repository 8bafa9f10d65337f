"""Calls that index, sort, multiply and convolve."""

from collections.abc import Iterator

import torch

from tests.accuracy.op_level.op_layouts import (
    FLOATS,
    Case,
    layout,
    matrix,
    seeded,
    size,
    tensor,
)


def scatters() -> Iterator[Case]:
    """Writing through indices and masks."""
    rng = seeded(9)
    for _ in range(50):
        dtype = rng.choice(FLOATS)
        count, rows = rng.choice((1, 100, 2304, 2305, 9000, 40000)), size(rng, 50000)
        x = tensor([rows, rng.choice((1, 64, 300))], dtype)
        one, few = tensor([count], torch.int64), tensor([50], torch.int64)
        stride = [1, count] if rng.random() < 0.3 else None
        values = tensor([count, x.shape[1]], dtype, stride)
        op = rng.choice(("index_put", "_unsafe_index_put", "index_put_"))
        yield op, [x, [one], values, rng.random() < 0.7], {}
        y = tensor([rng.choice((2, 16)), rng.choice((128, 1000)), 64], dtype)
        shape = list(y.shape)
        full, rough = tensor(shape, torch.bool), tensor([*shape[:2], 1], torch.bool)
        source = tensor([count, 64], dtype)
        yield "masked_scatter", [y, rng.choice((full, rough)), source], {}
        values = tensor([shape[0], 50, 64], dtype)
        yield "index_put_", [y, [None, few], values, True], {}
        yield "index_put_", [y, [few, few], tensor([50, 64], dtype), True], {}


def gathers() -> Iterator[Case]:
    """Reading through indices."""
    rng = seeded(14)
    for _ in range(40):
        y = tensor([rng.choice((2, 64)), rng.choice((32, 128)), 48], rng.choice(FLOATS))
        two = tensor([40], torch.int64)
        wide = tensor([40, 40], torch.int64, rng.choice(([1, 0], [0, 1], None)))
        indices = rng.choice(([two, two], [None, two], [wide, two], [wide]))
        yield "index.Tensor", [y, indices], {}
        yield "embedding", [tensor([100, 48]), wide], {}
        yield "index_select", [y, 0, two], {}
        yield "gather", [y, 0, tensor([40, y.shape[1], 48], torch.int64)], {}


def sorts() -> Iterator[Case]:
    """Sorts and running sums."""
    rng = seeded(15)
    kinds = (torch.float32, torch.int64, torch.int32, torch.float64)
    for _ in range(60):
        y = layout(rng, rng.choice(kinds), rng.randint(1, 2), 2**18)
        yield "cumsum", [y, rng.randrange(y.dim())], {}
        count = rng.choice((1, 100, 2304, 4097, 9000, 40000))
        shape = rng.choice(([count], [8, 100], [4, 5000], [1, 9000], [3, 4096]))
        yield "sort.default", [tensor(shape, rng.choice(kinds))], {}
        y = tensor([count], rng.choice((torch.float32, torch.int64)))
        yield "sort.stable", [y], {"stable": True}


def products() -> Iterator[Case]:
    """Matrix products of every layout, grouped ones, convolutions, gradient norms."""
    rng = seeded(10)
    for _ in range(200):
        dtype = rng.choice(FLOATS)
        m, k, n = (rng.choice((1, 8, 24, 64, 200)) for _ in range(3))
        if rng.random() < 0.5:
            left, right = matrix(rng, dtype, [m, k]), matrix(rng, dtype, [k, n])
            if rng.random() < 0.5:
                yield "mm", [left, right], {}
            else:
                yield "addmm", [tensor([n], dtype), left, right], {}
        else:
            b = rng.choice((1, 2, 12))
            left, right = matrix(rng, dtype, [b, m, k]), matrix(rng, dtype, [b, k, n])
            yield "bmm", [left, right], {}
    for groups in (1, 2, 3, 4, 5, 7, 8, 60):
        x, offsets = tensor([4096, 512], torch.bfloat16), tensor([groups], torch.int32)
        weight = tensor([groups, 512, 256], torch.bfloat16)
        yield "_grouped_mm", [x, weight, offsets], {}
        grad = tensor([4096, 256], torch.bfloat16)
        turned = tensor([512, 4096], torch.bfloat16, [1, 512])
        yield "_grouped_mm", [turned, grad, offsets], {}
    for dtype in FLOATS:
        tensors = [tensor([size(rng, 2**20)], dtype) for _ in range(rng.randint(1, 9))]
        yield "_foreach_norm.Scalar", [tensors, 2], {}


def convolutions() -> Iterator[Case]:
    """Convolutions without cuDNN: patches, points, 1-D, depthwise."""
    rng = seeded(11)
    for _ in range(40):
        dtype = rng.choice(FLOATS[:2])
        dims, kernel = rng.choice((1, 2, 2)), rng.choice((1, 3, 4, 16))
        stride, padding = rng.choice(((1, 0), (kernel, 0), (1, kernel // 2), (2, 0)))
        n, channels, outputs, side = rng.choice((2, 8)), rng.choice((3, 32)), 48, 64
        x = tensor([n, channels, *[side] * dims], dtype)
        weight = tensor([outputs, channels, *[kernel] * dims], dtype)
        out = (side + 2 * padding - kernel) // stride + 1
        rest = [[stride] * dims, [padding] * dims, [1] * dims, False, [0] * dims, 1]
        bias = rng.random() < 0.5
        b = tensor([outputs], dtype) if bias else None
        yield "convolution", [x, weight, b, *rest], {}
        grad = tensor([n, outputs, *[out] * dims], dtype)
        sizes = [outputs] if bias else None
        mask = [rng.random() < 0.7, True, bias]
        yield "convolution_backward", [grad, x, weight, sizes, *rest, mask], {}


def images() -> Iterator[Case]:
    """Resizing, pooling and rolling, with plain and odd gradients."""
    rng = seeded(16)
    for _ in range(40):
        n, c, side = rng.choice((1, 4)), rng.choice((3, 64)), rng.choice((14, 32))
        x = tensor([n, c, side, side], rng.choice(FLOATS[:2]))
        small, large = [n, c, side // 2, side // 2], [n, c, side * 2, side * 2]
        grad = tensor(small, x.dtype, rng.choice((None, [0, 0, 0, 0])))
        pool = [[2, 2], [2, 2], [0, 0]]
        yield "avg_pool2d_backward", [grad, x, *pool, False, True, None], {}
        wide = tensor(large, x.dtype, rng.choice((None, [0, 0, 0, 0])))
        sizes = [[2 * side, 2 * side], list(x.shape)]
        yield "upsample_bilinear2d_backward", [wide, *sizes, False], {}
        yield "upsample_nearest2d_backward", [wide, *sizes], {}
        yield "roll", [x, [1, 2], [2, 3]], {}
        yield "roll", [x, [3], [2]], {}
        few = tensor([n * side, c], x.dtype)
        reduced = rng.randint(0, 2)
        args = [few, few, None, None, reduced]
        yield "binary_cross_entropy_with_logits", args, {}


def long_rows() -> Iterator[Case]:
    """Largest values, sorts and running products of long rows, in every dtype."""
    rng = seeded(55)
    kinds = (*FLOATS, torch.int64, torch.int32, torch.float64, torch.uint8)
    for _ in range(60):
        dtype = rng.choice(kinds)
        rows, length = (
            rng.choice((1, 3, 64, 1000)),
            rng.choice((1000, 1024, 5000, 50257)),
        )
        if rows * length > 2**23:
            rows = 4
        x = tensor([rows, length], dtype)
        if rng.random() < 0.3:
            x = tensor([rows, length], dtype, [1, rows])
        if rng.random() < 0.1:
            x = tensor([length], dtype)
        dim = -1
        if rng.random() < 0.2 and x.dim() > 1:
            x, dim = tensor([length, rows], dtype), 0
        count = rng.choice((1, 5, 50, 900))
        largest, ordered = rng.random() < 0.7, rng.random() < 0.7
        yield "topk", [x, count, dim, largest, ordered], {}
        yield "cumsum", [x, dim], {}
        yield "cumprod", [x, dim], {}
        yield "sort.default", [x, dim, largest], {}
        yield "sort.stable", [x], {"stable": True, "dim": dim}
        yield "median.dim", [x, dim], {}
        yield "kthvalue", [x, count, dim], {}
        if dtype.is_floating_point:
            yield "logcumsumexp", [x, dim], {}
        yield rng.choice(("cummax", "cummin")), [x, dim], {}
    for rows in (4000, 4001, 70_000, 200_000):
        yield "topk", [tensor([rows, 500], torch.bfloat16), 8], {}
    yield "topk", [tensor([20, 30_000], torch.bfloat16), 5000], {}
