"""Calls of modules: normalization, pooling, resizing, cells, losses, rarer layers."""

import random
from collections.abc import Iterator
from math import prod

import torch

from tests.accuracy.op_level.convolution_cases import image
from tests.accuracy.op_level.op_layouts import (
    FLOATS,
    Case,
    layout,
    seeded,
    size,
    tensor,
)

LONG = torch.int64


def batch_norms() -> Iterator[Case]:
    """Batch normalization without cuDNN, contiguous or with the channels last."""
    rng = seeded(41)
    for _ in range(40):
        dtype = rng.choice(FLOATS)
        dims = rng.choice((0, 2, 2, 2))
        channels = rng.choice((3, 32, 64, 100))
        shape = [rng.choice((2, 16)), channels, *[rng.choice((7, 20))] * dims]
        x = image(rng, shape, dtype, 0.5 if dims else 0.0)
        grad = image(rng, shape, dtype, 0.5 if dims else 0.0)
        weight = rng.choice((None, tensor([channels], rng.choice((dtype, FLOATS[0])))))
        running = rng.choice((None, tensor([channels])))
        train = True
        args = [x, weight, weight, running, running, train, 0.1, 1e-5]
        yield "native_batch_norm", args, {}
        stats = tensor([channels])
        mask = [True, weight is not None, weight is not None]
        saved = [running, running, stats, stats, train, 1e-5, mask]
        yield "native_batch_norm_backward", [grad, x, weight, *saved], {}


def more_norms() -> Iterator[Case]:
    """Forward of layer, RMS and group normalization, in any layout."""
    rng = seeded(42)
    for _ in range(30):
        dtype = rng.choice(FLOATS)
        columns = rng.choice((64, 100, 768))
        x = tensor([2, 50, columns], dtype, rng.choice((None, [1, 2 * columns, 2])))
        weight = rng.choice((None, tensor([columns], dtype)))
        yield "native_layer_norm", [x, [columns], weight, weight, 1e-5], {}
        yield "_fused_rms_norm", [x, [columns], weight, 1e-5], {}
        x = tensor([2, 32, 14, 14], dtype)
        weight = rng.choice((None, tensor([32], dtype)))
        sizes = [2, 32, 196, rng.choice((1, 8, 32))]
        yield "native_group_norm", [x, weight, weight, *sizes, 1e-5], {}
        stats = tensor([2, sizes[-1]], dtype)
        grad = tensor([2, 32, 14, 14], dtype)
        mask = [True, weight is not None, weight is not None]
        args = [grad, x, stats, stats, weight, *sizes, mask]
        yield "native_group_norm_backward", args, {}
        v, g = tensor([64, 8, 3], dtype), tensor([1, 1, 3], dtype)
        norms = tensor([1, 1, 3])
        yield "_weight_norm_interface", [v, g, 2], {}
        yield "_weight_norm_interface_backward", [v, v, g, norms, 2], {}
        g, norms = tensor([64, 1, 1], dtype), tensor([64, 1, 1])
        yield "_weight_norm_interface", [v, g, 0], {}
        yield "_weight_norm_interface_backward", [v, v, g, norms, 0], {}


def poolings() -> Iterator[Case]:
    """Pooling and its gradients."""
    rng = seeded(43)
    for _ in range(20):
        dtype = rng.choice(FLOATS)
        n, c, side = rng.choice((1, 4)), rng.choice((3, 64)), rng.choice((14, 32))
        x, half = (image(rng, [n, c, s, s], dtype) for s in (side, side // 2))
        index = image(rng, [n, c, side // 2, side // 2], LONG)
        pool = [[2, 2], [2, 2], [0, 0]]
        yield "max_pool2d_with_indices", [x, *pool], {}
        args = [half, x, *pool, [1, 1], False, index]
        yield "max_pool2d_with_indices_backward", args, {}
        yield "avg_pool2d", [x, *pool], {}
        yield "avg_pool2d_backward", [half, x, *pool, False, True, None], {}
        out = rng.choice((1, 7))
        small = image(rng, [n, c, out, out], dtype)
        yield "_adaptive_avg_pool2d", [x, [out, out]], {}
        yield "_adaptive_avg_pool2d_backward", [small, x], {}
        yield "adaptive_max_pool2d", [x, [out, out]], {}
        place = tensor([n, c, out, out], LONG)
        yield "adaptive_max_pool2d_backward", [small, x, place], {}
        volume = image(rng, [n, c, 8, 8, 8], dtype)
        grad = image(rng, [n, c, 4, 4, 4], dtype)
        cube = [[2, 2, 2], [2, 2, 2], [0, 0, 0]]
        yield "avg_pool3d", [volume, *cube], {}
        yield "avg_pool3d_backward", [grad, volume, *cube, False, True, None], {}
        yield "max_pool3d_with_indices", [volume, *cube], {}
        place = tensor([n, c, 4, 4, 4], LONG)
        args = [grad, volume, *cube, [1, 1, 1], False, place]
        yield "max_pool3d_with_indices_backward", args, {}
        yield "_adaptive_avg_pool3d", [volume, [2, 2, 2]], {}
        small = image(rng, [n, c, 2, 2, 2], dtype)
        yield "_adaptive_avg_pool3d_backward", [small, volume], {}


def resizings() -> Iterator[Case]:
    """Resizing, padding, sampling and folding, with their gradients."""
    rng = seeded(44)
    for _ in range(20):
        dtype = rng.choice(FLOATS)
        n, c, side = rng.choice((1, 4)), rng.choice((3, 64)), rng.choice((14, 32))
        to = rng.choice((side, 2 * side, side // 2))
        x, wide = (image(rng, [n, c, s, s], dtype) for s in (side, to))
        old, new = [n, c, side, side], [to, to]
        for kind in ("bilinear2d", "bicubic2d"):
            yield f"upsample_{kind}", [x, new, False], {}
            yield f"upsample_{kind}_backward", [wide, new, old, False], {}
        for kind in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
            yield kind, [x, new], {}
            yield f"{kind}_backward", [wide, new, old], {}
        line, wave = tensor([n, c, side], dtype), tensor([n, c, to], dtype)
        yield "upsample_linear1d", [line, [to], False], {}
        yield "upsample_linear1d_backward", [wave, [to], old[:3], False], {}
        yield "upsample_nearest1d", [line, [to]], {}
        yield "upsample_nearest1d_backward", [wave, [to], old[:3]], {}
        edge = [n, c, side + 2, side + 2]
        for kind in ("reflection_pad2d", "replication_pad2d"):
            yield kind, [x, [1, 1, 1, 1]], {}
            grad = image(rng, edge, dtype)
            yield f"{kind}_backward", [grad, x, [1, 1, 1, 1]], {}
        yield "reflection_pad1d", [line, [1, 1]], {}
        grad = tensor([n, c, side + 2], dtype)
        yield "reflection_pad1d_backward", [grad, line, [1, 1]], {}
        points = tensor([n, 9, 9, 2], dtype)
        out = image(rng, [n, c, 9, 9], dtype)
        yield "grid_sampler_2d", [x, points, 0, 0, False], {}
        args = [out, x, points, 0, 0, False, [rng.random() < 0.7, True]]
        yield "grid_sampler_2d_backward", args, {}
        window = [[2, 2], [1, 1], [0, 0], [2, 2]]
        yield "im2col", [x, *window], {}
        yield (
            "col2im",
            [tensor([n, c * 4, side * side // 4], dtype), [side, side], *window],
            {},
        )
        yield "roll", [x, [1, 2], [2, 3]], {}


def recurrent() -> Iterator[Case]:
    """Fused cells of recurrent layers."""
    rng = seeded(45)
    for _ in range(12):
        dtype = rng.choice(FLOATS)
        rows, width = rng.choice((4, 64, 3000)), rng.choice((32, 200))
        bias = rng.random() < 0.7
        for gates, name in ((4, "lstm"), (3, "gru")):
            sums, state = (
                tensor([rows, gates * width], dtype),
                tensor([rows, width], dtype),
            )
            biases = [tensor([gates * width], dtype)] * 2 if bias else []
            yield f"_thnn_fused_{name}_cell", [sums, sums, state, *biases], {}
        work = tensor([rows, 4 * width], dtype)
        args = [state, rng.choice((None, state)), state, state, work, bias]
        yield "_thnn_fused_lstm_cell_backward_impl", args, {}
        work = tensor([rows, 5 * width], dtype)
        yield "_thnn_fused_gru_cell_backward", [state, work, bias], {}


def more_losses() -> Iterator[Case]:
    """Gradients of losses, and rarer ones."""
    rng = seeded(46)
    for _ in range(15):
        dtype = rng.choice(FLOATS)
        x = layout(rng, dtype, rng.randint(1, 3), 2**16)
        plain, reduced = tensor(list(x.shape), dtype), rng.randint(0, 2)
        grad = plain if reduced == 0 else tensor([], dtype)
        yield "mse_loss_backward", [grad, x, plain, reduced], {}
        yield "smooth_l1_loss_backward", [grad, x, plain, reduced, 1.0], {}
        yield "huber_loss_backward", [grad, x, plain, reduced, 1.0], {}
        args = [grad, plain, plain, None, reduced]
        yield "binary_cross_entropy_backward", args, {}
        yield "soft_margin_loss", [plain, plain, reduced], {}
        yield "soft_margin_loss_backward", [grad, plain, plain, reduced], {}
        rows, classes = rng.choice((8, 3000)), rng.choice((5, 300))
        scores, target = tensor([rows, classes]), tensor([rows], LONG)
        grad = tensor([rows] if reduced == 0 else [])
        yield "multi_margin_loss", [scores, target, 1, 1, None, reduced], {}
        args = [grad, scores, target, 1, 1, None, reduced]
        yield "multi_margin_loss_backward", args, {}
        maps = image(rng, [2, 9, 14, 14], dtype, 0.5)
        place = tensor([2, 14, 14], LONG)
        yield "nll_loss2d_forward", [maps, place, None, reduced, -100], {}
        grad = tensor([2, 14, 14] if reduced == 0 else [], dtype)
        total = tensor([], dtype)
        args = [grad, maps, place, None, reduced, -100, total]
        yield "nll_loss2d_backward", args, {}
        length, batch, labels = rng.choice((20, 49)), 3, rng.choice((5, 20))
        chances = tensor([length, batch, 32])
        words = tensor([batch, labels], LONG)
        sizes = [[length] * batch, [labels] * batch, 0]
        alpha = tensor([batch, length, 2 * labels + 1])
        args = [tensor([batch]), chances, words, *sizes[:2], tensor([batch]), alpha, 0]
        yield "_ctc_loss_backward", args, {}


def rarer() -> Iterator[Case]:
    """Bags of embeddings, distances, largest values, scatters and running extrema."""
    rng = seeded(47)
    for _ in range(15):
        dtype = rng.choice(FLOATS)
        count, columns = rng.choice((50, 4000)), rng.choice((16, 300))
        one, two = tensor([30, 16]), tensor([size(rng, 900), 16])
        power = rng.choice((1.0, 2.0, 3.0))
        yield "_cdist_forward", [one, two, power, 2], {}
        apart = tensor([30, two.shape[0]])
        yield "_cdist_backward", [apart, one, two, power, apart], {}
        x = layout(rng, dtype, rng.randint(1, 3), 2**16)
        dim = rng.randrange(x.dim())
        if x.shape[dim] < 1024:
            yield "topk", [x, max(1, x.shape[dim] // 3), dim], {}
        yield "cummax", [x, dim], {}
        yield "median.dim", [x, dim], {}
        yield "kthvalue", [x, 1, dim], {}
        whole = tensor([64, 300], dtype)
        some = tensor([20], LONG)
        rows = tensor([20, 300], dtype, rng.choice((None, [1, 20])))
        yield "index_add", [whole, 0, some, rows], {}
        yield "index_add_", [whole, 0, some, rows], {}
        yield "index_copy", [whole, 0, some, rows], {}
        yield "index_fill.int_Scalar", [whole, 0, some, 1.0], {}
        every = tensor([20, 300], LONG)
        yield "scatter.src", [whole, 0, every, rows], {}
        yield "scatter.value", [whole, 0, every, 1.0], {}
        yield "scatter_add", [whole, 0, every, rows], {}
        yield "scatter_add_", [whole, 0, every, rows], {}
        yield "scatter_reduce.two", [whole, 0, every, rows, "sum"], {}
        yield "scatter_.src", [whole, 0, every, rows], {}
        yield "take", [whole, some], {}
        yield "histc", [tensor([count]), 100, 0, 99], {}
        yield "cross", [tensor([count, 3], dtype), tensor([count, 3], dtype), 1], {}
        left, right = tensor([columns, 64], dtype), tensor([64], dtype)
        yield "mv", [left, right], {}
        yield "dot", [right, right], {}
        yield "addmv", [tensor([columns], dtype), left, right], {}
        b = tensor([3, 8, columns], dtype)
        yield (
            "baddbmm",
            [tensor([3, 8, 64], dtype), b, tensor([3, columns, 64], dtype)],
            {},
        )
        yield (
            "_addmm_activation",
            [tensor([64], dtype), tensor([8, columns], dtype), left],
            {},
        )


def folds() -> Iterator[Case]:
    """Folding of patches that overlap, and unfolding."""
    rng = seeded(53)
    for _ in range(30):
        dtype = rng.choice(FLOATS)
        n, c = rng.choice((1, 4)), rng.choice((3, 32))
        kernel, stride, padding = rng.choice(
            ((3, 1, 1), (5, 1, 2), (4, 2, 1), (2, 2, 0), (7, 4, 3), (3, 5, 0))
        )
        side = rng.choice((16, 40))
        places = ((side + 2 * padding - kernel) // stride + 1) ** 2
        shape = [n, c * kernel**2, places]
        window = [[kernel] * 2, [1, 1], [padding] * 2, [stride] * 2]
        turned = rng.choice((None, [places * shape[1], 1, shape[1]]))
        x = tensor(shape, dtype, turned)
        if rng.random() < 0.2:
            x = tensor(shape[1:], dtype)
        yield "col2im", [x, [side, side], *window], {}
        yield "im2col", [image(rng, [n, c, side, side], dtype), *window], {}


def odd_batch_norms() -> Iterator[Case]:
    """Batch normalization of any layout, in training and evaluation."""
    rng = seeded(54)
    for _ in range(60):
        dtype = rng.choice(FLOATS)
        ndim, channels = rng.choice((2, 3, 3, 4, 5)), rng.choice((1, 3, 64, 100))
        shape = [
            rng.choice((1, 2, 16)),
            channels,
            *[rng.choice((1, 5, 40))] * (ndim - 2),
        ]
        shape[0] += prod(shape) == channels  # one value of a channel has no variance
        x, grad = (
            layout_of(rng, shape, dtype) if rng.random() < 0.8 else tensor(shape, dtype)
            for _ in range(2)
        )
        kind = rng.choice((dtype, FLOATS[0]))
        weight = rng.choice((None, tensor([channels], kind)))
        running = rng.choice((None, tensor([channels], kind)))
        train = running is None or rng.random() < 0.7
        args = [x, weight, weight, running, running, train, 0.1, 1e-5]
        yield "native_batch_norm", args, {}
        stats = tensor([channels if train else 0])
        mask = [rng.random() < 0.8, weight is not None, weight is not None]
        saved = [running, running, stats, stats, train, 1e-5, mask]
        yield "native_batch_norm_backward", [grad, x, weight, *saved], {}


def odd_cells() -> Iterator[Case]:
    """Odd sizes of ops whose arguments fit each other too closely to be changed."""
    rng = seeded(58)
    for _ in range(8):
        dtype = rng.choice(FLOATS)
        rows, width = rng.choice((1, 17, 1025)), rng.choice((1, 3, 130))
        gates, state = tensor([rows, 3 * width], dtype), tensor([rows, width], dtype)
        bias = [tensor([3 * width], dtype)] * rng.choice((0, 2))
        yield "_thnn_fused_gru_cell", [gates, gates, state, *bias], {}
        work = tensor([rows, 5 * width], dtype)
        grad = tensor([rows, width], dtype, [1, rows])
        yield "_thnn_fused_gru_cell_backward", [grad, work, bool(bias)], {}
        scores = tensor([rows, width], dtype, rng.choice((None, [1, rows])))
        args = [tensor([], dtype), scores, tensor([rows], LONG), 2, 1.0, None, 1]
        yield "multi_margin_loss_backward", args, {}
        labels = rng.choice((1, 3, 40))
        chances = tensor([rows, 2, 32], rng.choice((torch.float32, torch.float64)))
        alpha = tensor([2, rows, 2 * labels + 1], chances.dtype)
        per_sample = tensor([2], chances.dtype)
        sizes = [[rows] * 2, [labels] * 2]
        args = [per_sample, chances, tensor([2, labels], LONG), *sizes]
        yield "_ctc_loss_backward", [*args, per_sample, alpha, 0], {}
        shapes = [[], [rows], [rows, width], [0]][: rng.randint(1, 4)]
        one, two, three = ([tensor(s, dtype) for s in shapes] for _ in range(3))
        settings = {
            "weight_decay": 0.0,
            "momentum": 0.9,
            "lr": 1e-3,
            "dampening": 0.1,
            "nesterov": False,
            "maximize": True,
            "is_first_step": rng.random() < 0.5,
        }
        yield "_fused_sgd_", [one, two, three], settings


def layout_of(rng: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose dimensions lie in any order, now and then with holes."""
    order, stride = rng.sample(range(len(shape)), len(shape)), [0] * len(shape)
    step = rng.choice((1, 1, 1, 2))
    for dim in order:
        stride[dim], step = step, step * shape[dim]
    return tensor(shape, dtype, stride)


def bilinear() -> Iterator[Case]:
    """``nn.Bilinear``, and the gradients of both inputs and of the weight."""
    rng = seeded(71)
    for _ in range(24):
        dtype = rng.choice(FLOATS)
        rows, outputs, one, other = (rng.randint(1, n) for n in (900, 5, 130, 130))
        x, y = tensor([rows, one], dtype), tensor([rows, other], dtype)
        if rng.random() < 0.2:
            x = tensor([rows, one], dtype, [1, rows])
        weight = tensor([outputs, one, other], dtype)
        gradient = tensor([rows, outputs], dtype)
        yield "_trilinear", [x, weight, y, [1, 3], [0], [1, 2], [2, 3]], {}
        yield "_trilinear", [gradient, weight, y, [2, 3], [0], [1, 2], [1, 3]], {}
        yield "_trilinear", [x, gradient, y, [1, 3], [2, 3], [1, 2], [0]], {}
        yield "_trilinear", [x, weight, gradient, [1, 3], [0], [2, 3], [1, 2]], {}
