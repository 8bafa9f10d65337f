"""Image ops whose channels are last in memory, and indices in int32."""

import random
from collections.abc import Iterator

import torch

from tests.accuracy.op_level.op_layouts import FLOATS, Case, seeded, tensor


def channels_last(
    rng: random.Random, shape: list[int], dtype: torch.dtype, sliced: float = 0.25
) -> torch.Tensor:
    """Return a tensor with channels last, now and then sliced from a wider one."""
    samples, channels, *sides = shape
    step = channels * (1 if rng.random() >= sliced else 2)
    strides = [1]
    for side in reversed(sides):
        strides.insert(1, step)
        step *= side
    return tensor([samples, *shape[1:]], dtype, [step, *strides])


def last_channels() -> Iterator[Case]:
    """Resizing, pooling and padding in two and three dimensions, with gradients."""
    rng = seeded(71)
    for round_ in range(24):
        dims = 2 + round_ % 2
        dtype, n = rng.choice(FLOATS), rng.choice((1, 2))
        c, side = rng.choice((1, 3, 4, 8)), rng.choice((8, 14))
        old = [n, c, *[side] * dims]

        x, wide, half, edged = (
            channels_last(rng, [n, c, *[size] * dims], dtype)
            for size in (side, 2 * side, side // 2, side + 2)
        )
        to = [2 * side] * dims
        linear = "upsample_bilinear2d" if dims == 2 else "upsample_trilinear3d"
        for name in (linear, *(["upsample_bicubic2d"] if dims == 2 else [])):
            yield name, [x, to, False], {}
            yield f"{name}_backward", [wide, to, old, False], {}
        for name in (f"upsample_nearest{dims}d", f"_upsample_nearest_exact{dims}d"):
            yield name, [x, to], {}
            yield f"{name}_backward", [wide, to, old], {}
        two, one, zero = [2] * dims, [1] * dims, [0] * dims
        yield f"max_pool{dims}d_with_indices", [x, two, two, zero, one, False], {}
        places = channels_last(rng, list(half.shape), torch.int64)
        window = [two, two, zero, one, False, places]
        yield f"max_pool{dims}d_with_indices_backward", [half, x, *window], {}
        yield f"avg_pool{dims}d", [x, two, two], {}
        rest = [two, two, zero, False, True, None]
        yield f"avg_pool{dims}d_backward", [half, x, *rest], {}
        small = [side // 2] * dims
        yield f"_adaptive_avg_pool{dims}d", [x, small], {}
        yield f"_adaptive_avg_pool{dims}d_backward", [half, x], {}
        yield f"adaptive_max_pool{dims}d", [x, small], {}
        yield f"adaptive_max_pool{dims}d_backward", [half, x, places], {}
        pad = [1] * (2 * dims)
        for name in (f"reflection_pad{dims}d", f"replication_pad{dims}d"):
            yield name, [x, pad], {}
            yield f"{name}_backward", [edged, x, pad], {}
        yield "constant_pad_nd", [x, pad], {}


def int32_indices() -> Iterator[Case]:
    """Reading and writing through indices that are not int64."""
    rng = seeded(72)
    for _ in range(30):
        y = tensor([rng.choice((2, 64)), rng.choice((32, 128)), 48], rng.choice(FLOATS))
        count = rng.choice((40, 4000))
        one = tensor([count], torch.int32, rng.choice(([0], [1], [2])))
        wide = tensor([count, 4], torch.int32, rng.choice(([1, count], [0, 1], None)))
        long = tensor([count], torch.int64)
        for indices in ([one], [one, long], [None, one], [wide], [one, one]):
            yield "index.Tensor", [y, indices], {}
        values = tensor([count, *y.shape[1:]], y.dtype)
        for added in (False, True):
            yield "index_put", [y, [one], values, added], {}
            yield "index_put_", [y, [one], values, added], {}
        for reduce in ("prod", "amax", "mean"):
            itself = {"include_self": rng.random() < 0.5}
            yield "index_reduce", [y, 0, one, values, reduce], itself
        yield "index_add", [y, 0, one, values], {}
        yield "index_select", [y, 1, one], {}
        yield "embedding", [tensor([100, 48], y.dtype), wide], {}
        scaled = rng.random() < 0.5
        grad = tensor([count, 4, 48], y.dtype)
        yield "embedding_dense_backward", [grad, wide, 100, -1, scaled], {}
