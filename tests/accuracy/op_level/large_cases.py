"""Calls that are too large for one launch or for 32-bit indices; rare ops beside."""

from collections.abc import Iterator

import torch

from tests.accuracy.op_level.op_layouts import Case, tensor

IMAGE = [64, 64, 512, 1024]  # of 2**31 elements
LAST = [64 * 512 * 1024, 1, 64 * 1024, 64]  # its strides with channels last
SINGLE, HALF, LONG = torch.float32, torch.bfloat16, torch.int64


def large_tensors() -> Iterator[Case]:
    """Batch norms, sorts and scans of about 2**31 elements."""
    row = tensor([64])
    for x in (
        tensor(IMAGE),
        tensor(IMAGE, SINGLE, LAST),
        tensor([64, 64, 768, 1024], HALF),
        tensor([64, 64, 768, 1024], torch.float16),
        tensor([64, 64, 511, 1024], HALF),
        tensor([2200000, 1000]),
    ):
        each = row if x.shape[1] == 64 else tensor([1000])
        for weight in (each, None):
            for train in (True, False):
                args = [x, weight, weight, each, each, train, 0.1, 1e-5]
                yield "native_batch_norm", args, {}
        for mask in ([True, True, True], [True, False, False], [False, True, True]):
            weight = each if mask[1] else None
            args = [x, x, weight, each, each, each, each, True, 1e-5, mask]
            yield "native_batch_norm_backward", args, {}
    for shape in (
        [4, 900_000],
        [4, 1_000_000],
        [4, 1_500_000],
        [300, 1_000_000],
        [3, 800_000_000],
        [600_000, 4096],
        [600_000, 4100],
    ):
        yield "sort", [tensor(shape)], {}
    yield "sort", [tensor([1_500_000, 4]), 0], {}
    yield "sort", [tensor([2, 1_500_000], torch.int64)], {}
    for count in (5000, 1_200_000):
        yield "topk", [tensor([4, 1_500_000]), count], {}
    for count in (2**30, 1_100_000_000):
        yield "cumsum", [tensor([count]), 0], {}
        masked = [tensor([count]), tensor([count], torch.bool), tensor([count])]
        yield "masked_scatter", masked, {}


def many_samples() -> Iterator[Case]:
    """Memory-efficient attention in several launches, forward and backward."""
    for samples, heads, length, width, dtype in (
        (65_535, 2, 32, 64, SINGLE),
        (70_000, 2, 32, 64, SINGLE),
        (70_000, 2, 33, 64, SINGLE),
        (131_070, 2, 32, 64, SINGLE),
        (140_000, 2, 32, 64, SINGLE),
        (70_000, 1, 32, 64, SINGLE),
        (70_000, 2, 32, 64, HALF),
        (140_000, 1, 32, 192, HALF),
    ):
        shape = [samples, heads, length, width]
        by_length = [heads * length * width, width, heads * width, 1]
        for x in (tensor(shape, dtype), tensor(shape, dtype, by_length)):
            for statistics in (True, False):
                args = [x, x, x, None, statistics]
                yield "_scaled_dot_product_efficient_attention", args, {}
            total = tensor([samples, heads, -(-length // 32) * 32], SINGLE)
            seed = torch.empty((), dtype=torch.int64, device="cpu")
            args = [x, x, x, x, None, x, total, seed, seed, 0.0, [True] * 3 + [False]]
            yield "_scaled_dot_product_efficient_attention_backward", args, {}


def rare_ops() -> Iterator[Case]:
    """Norms of slices, gamma functions, and zeros without memory."""
    for shape, dtype, dims in (
        ([3000, 1000], SINGLE, (0, 1)),
        ([3000, 1000], HALF, (0, 1)),
        ([300, 1000], torch.float64, (0, -1)),
        ([300, 100], torch.complex64, (1,)),
        ([10, 3000, 100], SINGLE, (0, 1, 2)),
        ([30, 10, 20, 3], SINGLE, (2,)),
    ):
        for dim in dims:
            for norm in (2, 1, 2.5):
                yield "renorm", [tensor(shape, dtype), norm, dim, 1.0], {}
            yield "renorm_", [tensor(shape, dtype), 2, dim, 1.0], {}
    turned = tensor([3000, 1000], SINGLE, [1, 3000])
    yield "renorm", [turned, 2, 0, 1.0], {}
    for shape, dtype in (
        ([1000, 1000], SINGLE),
        ([64], SINGLE),
        ([64, 30], torch.float64),
        ([100, 100], HALF),
    ):
        for terms in (1, 2, 5):
            yield "mvlgamma", [tensor(shape, dtype), terms], {}
            yield "mvlgamma_", [tensor(shape, dtype), terms], {}
    yield "mvlgamma", [tensor([100, 100], torch.int64), 3], {}
    yield "mvlgamma", [turned, 3], {}
    for shape, dtype in (
        ([1600], torch.int64),
        ([3000], torch.int32),
        ([4096], torch.int64),
        ([4097], torch.int64),
        ([1600, 100], torch.int64),
        ([1600, 100], torch.int32),
        ([0], torch.int64),
    ):
        table = tensor([3000, 1000])
        yield "embedding_renorm_", [table, tensor(shape, dtype), 1.0, 2.0], {}
    indices = tensor([100, 16], torch.int64, [1, 100])
    yield "embedding_renorm_", [tensor([3000, 1000]), indices, 1.0, 2.0], {}
    for sizes in ([], [1000], [3, 1000, 1000]):
        yield "_efficientzerotensor", [sizes], {"device": torch.device("cuda")}


def uncommon() -> Iterator[Case]:
    """Affine grids, distances, draws, counts and repetitions."""
    for shape, dtype, size in (
        ([4, 2, 3], SINGLE, [4, 3, 100, 70]),
        ([4, 2, 3], HALF, [4, 3, 70, 30]),
        ([1, 2, 3], SINGLE, [1, 1, 1, 1]),
        ([2, 3, 4], SINGLE, [2, 1, 45, 53, 49]),
        ([3, 3, 4], HALF, [3, 1, 9, 11, 30]),
    ):
        for align_corners in (False, True):
            theta = tensor(shape, dtype)
            yield "affine_grid_generator", [theta, size, align_corners], {}
    turned = tensor([3000, 1000], SINGLE, [1, 3000])
    for shape, dtype in (
        ([1000, 1000], SINGLE),
        ([300, 100], HALF),
        ([5, 100, 100], torch.float64),
        ([64], SINGLE),
    ):
        x = tensor(shape, dtype)
        for other in (x, tensor(shape[-1:], dtype)):
            for norm in (2, 1, 3.5):
                yield "dist", [x, other, norm], {}
        yield "normal.Tensor_float", [x, 1.5], {}
        for dim in range(len(shape)):
            yield "count_nonzero", [x, dim], {}
        yield "count_nonzero", [x], {}
    gaps = tensor([300, 100], HALF, [200, 2])
    row = tensor([300, 100], SINGLE, [0, 1])
    for x in (gaps, row):
        yield "dist", [x, x, 2], {}
        yield "normal.Tensor_float", [x, 1.5], {}
        for dim in (0, 1):
            yield "count_nonzero", [x, dim], {}
        for samples, replacement in ((1, False), (5, False), (5, True)):
            yield "multinomial", [x, samples, replacement], {}
    theta = tensor([4, 2, 3], SINGLE, [1, 12, 4])
    yield "affine_grid_generator", [theta, [4, 3, 100, 70], False], {}
    strided = tensor([9000], LONG, [2])
    yield "repeat_interleave.Tensor", [strided], {"output_size": 20_000}
    yield "dist", [turned, turned, 2], {}
    yield "dist", [turned, tensor([3000, 1000])], {}
    yield "normal.Tensor_float", [turned, 1.5], {}
    yield "count_nonzero", [turned], {}
    yield "count_nonzero", [tensor([1000, 1000], torch.bool), 1], {}
    yield "count_nonzero", [tensor([1000, 1000], torch.int64)], {}
    yield from _draws()


def _draws() -> Iterator[Case]:
    for weights in ([300], [5000], [32, 1000], [2000, 300]):
        for dtype in (SINGLE, HALF):
            for samples, replacement in ((1, True), (1, False), (5, False), (5, True)):
                args = [tensor(weights, dtype), samples, replacement]
                yield "multinomial", args, {}
    for count, dtype in (
        (64, torch.int64),
        (100_000, torch.int64),
        (9000, torch.int32),
    ):
        repeats = tensor([count], dtype)
        yield "repeat_interleave.Tensor", [repeats], {"output_size": 2 * count}


def seldom() -> Iterator[Case]:
    """Modes, powers of two, segments and what else few programs call."""
    turned = tensor([300, 200], SINGLE, [1, 300])
    gaps = tensor([300, 100], HALF, [200, 2])
    row = tensor([300, 100], SINGLE, [0, 1])
    for x in (tensor([300, 200]), tensor([30, 20, 50], HALF), turned, gaps, row):
        for dim in range(x.dim()):
            yield "mode", [x, dim], {}
    yield "mode", [tensor([3, 2049], torch.int64)], {}
    yield "mode", [tensor([2049, 3]), 0], {}
    for x in (tensor([300, 100]), tensor([300, 100], HALF), gaps, row):
        for power in (x, tensor([100]), tensor([300, 1], torch.int32), tensor([])):
            yield "ldexp.Tensor", [x, power], {}
    yield "ldexp.Tensor", [tensor([300, 100], torch.int64), tensor([100], LONG)], {}
    yield from _multilabel_losses()
    yield from _segments()
    for x, channels in (
        (tensor([40, 30, 20]), 30),
        (tensor([4000, 100], HALF), 100),
        (tensor([8, 100, 20, 30], HALF, [60_000, 1, 3000, 100]), 100),
    ):
        saved = [*[tensor([channels])] * 5, True, 1e-5, [True] * 3]
        yield "batch_norm_backward", [x, x, *saved, tensor([0], torch.uint8)], {}


def _multilabel_losses() -> Iterator[Case]:
    for shape, stride in (
        ([50], None),
        ([300, 40], None),
        ([300, 40], [1, 300]),
        ([20_000, 10], None),
    ):
        for dtype in (SINGLE, HALF):
            x, target = tensor(shape, dtype, stride), tensor(shape, LONG)
            for reduction in (0, 1, 2):
                yield "multilabel_margin_loss_forward", [x, target, reduction], {}
                grad = tensor(shape[:-1] if reduction == 0 else [], dtype)
                args = [grad, x, target, reduction, tensor(shape, dtype)]
                yield "multilabel_margin_loss_backward", args, {}


def _segments() -> Iterator[Case]:
    """Lengths are checked by their values, unless the call is ``unsafe``."""
    for shape, count, dtype in (
        ([1000], 50, SINGLE),
        ([30_000, 40], 5000, SINGLE),
        ([3000, 40], 500, HALF),
    ):
        for index in (LONG, torch.int32):
            for reduce in ("sum", "mean", "max"):
                x, lengths = tensor(shape, dtype), tensor([count], index)
                ends = tensor([count + 1], index)
                out = tensor([count, *shape[1:]], dtype)
                for kind in (
                    {"lengths": lengths, "unsafe": True},
                    {"offsets": ends},
                    {"offsets": ends, "unsafe": True},
                ):
                    yield "segment_reduce", [x, reduce], kind
                for kind in ({"lengths": lengths}, {"offsets": ends}):
                    args = [out, out, x, reduce]
                    yield "_segment_reduce_backward", args, kind
