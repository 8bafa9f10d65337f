"""Calls that reduce: sums, extrema, norms, losses, softmax."""

import random
from collections.abc import Iterator

import torch

from tests.accuracy.op_level.op_layouts import FLOATS, Case, layout, seeded, tensor


def sums() -> Iterator[Case]:
    """Sums and means of every layout."""
    rng = seeded(1)
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


def other_reductions() -> Iterator[Case]:
    """Everything that reduces, besides sums and means."""
    rng = seeded(6)
    floats = ("var.correction", "std.correction", "var_mean.correction")
    norm = "linalg_vector_norm"
    whole = ("max", "min", "argmax", "argmin", "any", "all", "prod", "logsumexp")
    one_dim = ("max.dim", "min.dim", "any.dim", "all.dim", "prod.dim_int")
    for _ in range(500):
        dtype = rng.choice((*FLOATS, *FLOATS, torch.int64, torch.bool, torch.float64))
        if not dtype.is_floating_point:
            op = rng.choice((*whole[:-2], *one_dim[:-1], "amax", "sum"))
        else:
            op = rng.choice((*whole, *one_dim, *floats, norm, norm, "amax", "amin"))
        if dtype == torch.bool and "arg" in op:
            op = "any"
        x = layout(rng, dtype, rng.randint(1, 4), 2**23)
        dims = sorted(rng.sample(range(x.dim()), rng.randint(1, x.dim())))
        keep = rng.random() < 0.5
        if op in ("amax", "amin", "logsumexp"):
            yield op, [x, dims, keep], {}
        elif op in floats:
            yield op, [x, dims], {"correction": 1, "keepdim": keep}
        elif op == norm:
            order = rng.choice((2, 2, 1, 0, float("inf"), 3))
            yield op, [x, order, rng.choice((None, dims)), keep], {}
        elif op in one_dim:
            yield op, [x, dims[0], keep], {}
        elif "arg" in op:
            yield op, [x, rng.choice((None, dims[0])), keep], {}
        else:
            yield op, [x], {}


def large_reductions() -> Iterator[Case]:
    """Reductions above 2 GiB, which are split."""
    rng = seeded(12)
    for _ in range(40):
        dtype = rng.choice(FLOATS)
        shape = [rng.choice((2, 9, 64, 40_000)), rng.choice((1000, 4096, 50257))]
        shape.append(
            max(
                2, (2**31 + 2**30 * rng.randint(0, 9)) // torch.Size(shape).numel() // 4
            )
        )
        rng.shuffle(shape)
        x = tensor(shape, dtype)
        dims = rng.sample(range(3), rng.randint(1, 3))
        op = rng.choice(("sum.dim_IntList", "mean.dim", "amax"))
        yield op, [x, sorted(dims), rng.random() < 0.5], {}
        yield "linalg_vector_norm", [x], {}


def softmaxes() -> Iterator[Case]:
    """Backward of softmax and log_softmax along any dimension."""
    rng = seeded(2)
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


def losses() -> Iterator[Case]:
    """Losses with every reduction, softmax forward, nll of any layout."""
    rng = seeded(7)
    for _ in range(120):
        dtype = rng.choice(FLOATS)
        x = layout(rng, dtype, rng.randint(1, 3), 2**20)
        shape = list(x.shape)
        kind = rng.randint(0, 3)
        if kind == 0:
            op = rng.choice(("mse_loss", "smooth_l1_loss", "huber_loss"))
            yield (
                op,
                [tensor(shape, dtype), tensor(shape, dtype), rng.randint(0, 2)],
                {},
            )
        elif kind == 1:
            plain = tensor(shape, dtype)
            yield "binary_cross_entropy", [plain, plain, None, rng.randint(0, 2)], {}
        elif kind == 2:
            op = rng.choice(("_softmax", "_log_softmax"))
            yield op, [x, rng.randrange(len(shape)), False], {}
        else:
            rows, columns = rng.choice((8, 8192)), rng.choice((32, 50257 // 8))
            logits = tensor([rows, columns], dtype, rng.choice((None, [1, rows])))
            target = tensor([rows], torch.int64)
            mean = rng.randint(1, 2)
            yield "nll_loss_forward", [logits, target, None, mean, -100], {}
            one = tensor([], dtype)
            args = [one, logits, target, None, mean, -100, one]
            yield "nll_loss_backward", args, {}


def odd_reductions() -> Iterator[Case]:
    """Every reduction of every dtype, over any dimensions, also of size 0 and 1."""
    rng = seeded(56)
    kinds = (*FLOATS, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8)
    for _ in range(500):
        dtype = rng.choice(kinds)
        x = layout(rng, dtype, rng.randint(1, 5), 2**20)
        if rng.random() < 0.05:
            x = tensor([], dtype)
        if x.dim() and rng.random() < 0.2:
            shape = list(x.shape)
            shape[rng.randrange(x.dim())] = rng.choice((0, 1, 1))
            x = tensor(shape, dtype)
        every = range(max(1, x.dim()))
        dims = sorted(rng.sample(every, rng.randint(0, len(every))))
        keep = rng.random() < 0.5
        into = rng.choice((None, None, *FLOATS, torch.float64))
        named = {} if into is None else {"dtype": into}
        one = rng.choice(every) - rng.choice((0, len(every)))
        yield from _one_of(
            rng,
            [
                ("sum.dim_IntList", [x, rng.choice((None, dims)), keep], named),
                ("sum.default", [x], named),
                ("mean.dim", [x, rng.choice((None, dims)), keep], named),
                ("mean.default", [x], named),
                ("nansum", [x, rng.choice((None, dims)), keep], named),
                ("prod.default", [x], named),
                ("prod.dim_int", [x, one, keep], named),
            ],
        )
        yield from _one_of(
            rng,
            [
                ("amax", [x, dims, keep], {}),
                ("amin", [x, dims, keep], {}),
                ("aminmax", [x], {"dim": one}),
                ("max.dim", [x, one, keep], {}),
                ("min.dim", [x, one, keep], {}),
                ("max", [x], {}),
                ("min", [x], {}),
                ("argmax", [x, rng.choice((None, one)), keep], {}),
                ("argmin", [x, rng.choice((None, one)), keep], {}),
                ("any", [x], {}),
                ("all", [x], {}),
                ("any.dim", [x, one, keep], {}),
                ("all.dim", [x, one, keep], {}),
                ("any.dims", [x, dims, keep], {}),
                ("count_nonzero.dim_IntList", [x, dims], {}),
            ],
        )
        order = rng.choice((2, 1, 0, 3, 1.5, -1, float("inf"), float("-inf")))
        yield from _one_of(
            rng,
            [
                (
                    "linalg_vector_norm",
                    [x, order, rng.choice((None, dims)), keep],
                    named,
                ),
                ("norm.ScalarOpt_dim", [x, order, dims, keep], {}),
                ("logsumexp", [x, dims, keep], {}),
                ("var.correction", [x, dims], {"correction": 1, "keepdim": keep}),
                ("std.correction", [x, dims], {"correction": 0, "keepdim": keep}),
                ("var_mean.correction", [x, dims], {"correction": 1, "keepdim": keep}),
                ("_softmax", [x, one, False], {}),
                ("_log_softmax", [x, one, False], {}),
            ],
        )


def _one_of(rng: random.Random, cases: list[Case]) -> Iterator[Case]:
    yield rng.choice(cases)
