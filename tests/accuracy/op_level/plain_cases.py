"""Calls of plain ops: arithmetic, copies, factories, joins, random numbers."""

import random
from collections.abc import Iterator

import torch

from tests.accuracy.op_level.op_layouts import (
    FLOATS,
    Case,
    layout,
    seeded,
    size,
    tensor,
)


def names(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


DEVICE = {"device": torch.device("cuda")}
UNARY = names("""
    abs acos asin atan ceil clone cos cosh digamma elu erf erfc erfinv exp exp2 expm1
    floor frac gelu hardsigmoid hardswish hardtanh isinf isnan leaky_relu lgamma log
    log10 log1p log2 logical_not logit mish neg reciprocal relu relu6 round rsqrt
    sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc zeros_like ones_like
    empty_like rand_like randn_like celu selu hardshrink softshrink positive nan_to_num
    signbit logical_not bernoulli log_sigmoid_forward
""")
BINARY = names("""
    add.Tensor sub.Tensor mul.Tensor div.Tensor atan2 fmod.Tensor remainder.Tensor
    maximum minimum pow.Tensor_Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor
    ge.Tensor logical_and logical_or logical_xor fmax fmin hypot logaddexp floor_divide
    xlogy.Tensor
""")
SCALAR = names("""
    add.Tensor sub.Tensor mul.Tensor div.Tensor pow.Tensor_Scalar eq.Scalar ne.Scalar
    lt.Scalar le.Scalar gt.Scalar ge.Scalar fmod.Scalar remainder.Scalar clamp
    clamp_min clamp_max fill.Scalar full_like rsub.Scalar
""")
IN_PLACE = names("""
    add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor copy_ relu_ sigmoid_ tanh_ exp_
    sqrt_ neg_ zero_ abs_ clamp_ fill_.Scalar normal_ uniform_ bernoulli_.float
    masked_fill_.Scalar addcmul_ addcdiv_ lerp_.Scalar lerp_.Tensor logical_not_ tril_
    triu_ random_ silu_ hardtanh_ hardswish_ leaky_relu_ exponential_ reciprocal_
    rsqrt_ pow_.Scalar floor_ clamp_min_ clamp_max_ round_ sign_ sin_ cos_ log_
""")
BACKWARD = {  # of grad and input, or output
    "gelu_backward": [],
    "hardsigmoid_backward": [],
    "hardswish_backward": [],
    "hardtanh_backward": [-1.0, 1.0],
    "leaky_relu_backward": [0.1, False],
    "mish_backward": [],
    "sigmoid_backward": [],
    "silu_backward": [],
    "softplus_backward": [1, 20],
    "tanh_backward": [],
    "threshold_backward": [0],
    "logit_backward": [None],
    "hardshrink_backward": [0.5],
    "softshrink_backward": [0.5],
}
EXTRA = {
    "clamp": [0, 1],
    "clamp_": [0, 1],
    "masked_fill_.Scalar": None,
    "normal_": [],
    "exponential_": [],
    "bernoulli_.float": [0.5],
}


def some(rng: random.Random, dtypes: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
    """Return a tensor of any layout."""
    return layout(rng, rng.choice(dtypes), rng.randint(1, 4), 2**18)


def owned(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of any layout without expanded dimensions: one to write to."""
    while True:
        x = layout(rng, dtype, rng.randint(1, 4), 2**18)
        if 0 not in x.stride():
            return x


def broadcast(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Return what can be combined with ``x``: the same shape, or with ones in it."""
    shape = [n if rng.random() < 0.7 else 1 for n in x.shape]
    other = tensor(shape[rng.randint(0, len(shape) - 1) :], rng.choice(FLOATS))
    return other if rng.random() < 0.5 else tensor(list(x.shape), x.dtype)


def unary() -> Iterator[Case]:
    """Functions of one tensor, and their gradients."""
    rng = seeded(31)
    for _ in range(3):
        for op in sorted(set(UNARY)):
            yield op, [some(rng)], {}
        for op, rest in BACKWARD.items():
            x = some(rng)
            yield op, [tensor(list(x.shape), x.dtype), x, *rest], {}
            yield op, [x, tensor(list(x.shape), x.dtype), *rest], {}
        x = tensor([4, size(rng, 999), 6], rng.choice(FLOATS))
        yield "glu", [x, rng.choice((0, 2))], {}
        yield "glu_backward", [tensor([2, *x.shape[1:]], x.dtype), x, 0], {}
        buffer = tensor([0], x.dtype)
        yield "log_sigmoid_backward", [x, x, buffer], {}
        x = tensor([4, 8, 99], x.dtype)
        yield "elu_backward", [x, 1.0, 1, 1, False, x], {}
        yield "_prelu_kernel", [x, tensor([1, 8, 1], x.dtype)], {}
        yield "_prelu_kernel_backward", [x, x, tensor([1, 8, 1], x.dtype)], {}


def binary() -> Iterator[Case]:
    """Functions of two tensors or of one and a number, with broadcasting."""
    rng = seeded(32)
    for _ in range(3):
        for op in BINARY:
            x = some(rng)
            yield op, [x, broadcast(rng, x)], {}
        for op in SCALAR:
            yield op, [some(rng), 2.5 if rng.random() < 0.5 else 2], {}
        for op in ("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor"):
            x = some(rng, (torch.bool, torch.int64))
            yield op, [x, tensor(list(x.shape), x.dtype)], {}
        yield "bitwise_not", [some(rng, (torch.bool, torch.int64))], {}
        yield "pow.Scalar", [2.0, some(rng)], {}
        yield "tril", [layout(rng, rng.choice(FLOATS), 3, 2**16)], {}
        yield "triu", [layout(rng, rng.choice(FLOATS), 2, 2**16), 1], {}
        for op in ("add.Tensor", "mul.Tensor", "sub.Tensor", "eq.Tensor", "lt.Tensor"):
            x = some(rng, (torch.int64, torch.int32))
            yield op, [x, tensor(list(x.shape), torch.int64)], {}
        x = some(rng)
        shape = list(x.shape)
        mask = tensor([shape[-1]], torch.bool)
        yield "where.self", [mask, x, broadcast(rng, x)], {}
        yield "where.ScalarOther", [mask, x, 0.0], {}
        yield "where.ScalarSelf", [mask, 1.0, x], {}
        yield "where.Scalar", [mask, 1.0, 0.0], {}
        yield "masked_fill.Scalar", [x, mask, 0.0], {}
        yield "masked_fill.Tensor", [x, mask, tensor([], x.dtype)], {}
        other = tensor(shape, x.dtype)
        yield "addcmul", [x, other, other], {"value": 0.5}
        yield "addcdiv", [x, other, other], {"value": 0.5}
        yield "lerp.Scalar", [x, other, 0.5], {}
        yield "lerp.Tensor", [x, other, other], {}
        yield "div.Tensor_mode", [x, other], {"rounding_mode": "floor"}
        yield "div.Scalar_mode", [x, 3], {"rounding_mode": "trunc"}


def numbers() -> Iterator[Case]:
    """Functions of one tensor and a number, of any layout and dtype."""
    rng = seeded(57)
    for _ in range(6):
        for dtype in (*FLOATS, torch.int64):
            for op in ("add.Scalar", "sub.Scalar", "rsub.Scalar"):
                yield op, [some(rng, (dtype,)), rng.choice((2, 2.5))], {}
            yield "sgn", [some(rng, (dtype,))], {}
            yield "mul.Scalar", [some(rng, (dtype,)), 2.5], {}


def in_place() -> Iterator[Case]:
    """What is written into an existing tensor."""
    rng = seeded(33)
    two = ("add_", "sub_", "mul_", "div_", "copy_")
    for _ in range(3):
        for op in sorted(set(IN_PLACE)):
            x = owned(rng, rng.choice(FLOATS))
            other = tensor(list(x.shape), rng.choice(FLOATS))
            name = op.partition(".")[0]
            if name in two:
                yield op, [x, other if rng.random() < 0.7 else some_row(x)], {}
            elif name in ("addcmul_", "addcdiv_"):
                other = tensor(list(x.shape), x.dtype)
                yield op, [x, other, other], {"value": 0.5}
            elif name == "lerp_":
                other = tensor(list(x.shape), x.dtype)
                yield op, [x, other, 0.5 if "Scalar" in op else other], {}
            elif name == "masked_fill_":
                yield op, [x, tensor([x.shape[-1]], torch.bool), 0.0], {}
            elif name in ("fill_", "pow_", "clamp_min_", "clamp_max_"):
                yield op, [x, 2.0], {}
            elif name in ("tril_", "triu_") and x.dim() < 2:
                continue
            else:
                yield op, [x, *(EXTRA.get(op) or [])], {}
        x = owned(rng, torch.float32)
        yield "mul_.Tensor", [x, 0.5], {}
        yield "add_.Tensor", [x, 1], {}
        yield "div_.Tensor", [x, 2.0], {}
        yield "copy_", [x, tensor(list(x.shape), torch.bfloat16)], {}


def some_row(x: torch.Tensor) -> torch.Tensor:
    """Return a row to be broadcast over ``x``."""
    return tensor([x.shape[-1]], x.dtype)


def optimizers() -> Iterator[Case]:
    """Steps on lists of tensors, and what is written by a value on the card."""
    rng = seeded(35)
    for _ in range(4):
        count = rng.randint(1, 5)
        shapes = [[size(rng, 500), size(rng, 300)] for _ in range(count)]
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
        one, two, three = ([tensor(shape, dtype) for shape in shapes] for _ in range(3))
        steps = [tensor([]) for _ in shapes]
        yield "_foreach_add_.Tensor", [one, tensor([])], {}
        yield "_foreach_sub_.List", [one, two], {}
        yield "_foreach_mul_.List", [one, two], {}
        yield "_foreach_mul_.Tensor", [one, tensor([])], {}
        yield "_foreach_sqrt", [one], {}
        yield "_foreach_sqrt_", [one], {}
        yield "_foreach_mul.Scalar", [one, 2.0], {}
        yield "_foreach_mul.List", [one, two], {}
        yield "_foreach_add.List", [one, two], {}
        yield "_foreach_sub.List", [one, two], {}
        yield "_foreach_div.List", [one, two], {}
        yield "_foreach_neg", [one], {}
        yield "_foreach_neg_", [one], {}
        yield "_foreach_pow.ScalarAndTensor", [0.9, steps], {}
        yield "_foreach_maximum_.List", [one, two], {}
        yield "_foreach_copy_", [one, two], {}
        yield "_foreach_zero_", [one], {}
        yield "_foreach_lerp_.List", [one, two, three], {}
        settings = {
            "lr": 1e-3,
            "beta1": 0.9,
            "beta2": 0.99,
            "weight_decay": 0.1,
            "eps": 1e-8,
            "amsgrad": False,
            "maximize": False,
        }
        yield "_fused_adamw_", [one, two, three, one, [], steps], settings
        yield "_fused_adam_", [one, two, three, one, [], steps], settings
        momentum = {
            "weight_decay": 0.1,
            "momentum": 0.9,
            "lr": 1e-3,
            "dampening": 0.0,
            "nesterov": False,
            "maximize": False,
            "is_first_step": False,
        }
        yield "_fused_sgd_", [one, two, three], momentum
        scale, tracker = tensor([1]), tensor([1], torch.int32)
        yield "_amp_update_scale_", [scale, tracker, tensor([1]), 2.0, 0.5, 2000], {}
        x = owned(rng, dtype)
        yield "fill_.Tensor", [x, tensor([], dtype)], {}
        yield "as_strided_", [tensor([64], dtype), [4, 8], [8, 1], 0], {}
        yield "mul.Scalar", [some(rng), 2.0], {}
        yield "_safe_softmax", [layout(rng, rng.choice(FLOATS), 3, 2**16), -1], {}


def makers() -> Iterator[Case]:
    """New tensors, copies, joins and pieces."""
    rng = seeded(34)
    for _ in range(5):
        dtype = rng.choice(FLOATS)
        shape = [rng.choice((1, 3, 300)), size(rng, 2000)]
        x = layout(rng, dtype, rng.randint(1, 4), 2**18)
        yield "empty.memory_format", [shape], {"dtype": dtype, **DEVICE}
        yield "empty_strided", [shape, [1, shape[0]]], {"dtype": dtype, **DEVICE}
        for op in ("zeros", "ones", "rand", "randn"):
            yield op, [shape], {"dtype": dtype, **DEVICE}
        yield "full", [shape, 2.0], {"dtype": dtype, **DEVICE}
        yield "scalar_tensor", [1.0], {"dtype": dtype, **DEVICE}
        yield "arange", [shape[1]], {"dtype": torch.int64, **DEVICE}
        yield "arange.start", [1, shape[1] + 1], {"dtype": dtype, **DEVICE}
        yield "arange.start_step", [0, 2 * shape[1], 2], {**DEVICE}
        yield "linspace", [0, 1, shape[1]], {"dtype": torch.float32, **DEVICE}
        yield "randint", [9, shape], {"dtype": torch.int64, **DEVICE}
        yield "eye", [shape[1]], {"dtype": dtype, **DEVICE}
        yield "new_empty", [x, shape], {}
        yield "new_zeros", [x, shape], {}
        yield "new_ones", [x, shape], {}
        yield "new_full", [x, shape, 1.0], {}
        yield "new_empty_strided", [x, shape, [1, shape[0]]], {}
        other = rng.choice((torch.float32, torch.bfloat16, torch.int64, torch.bool))
        yield "_to_copy", [x], {"dtype": other}
        yield (
            "_to_copy",
            [x],
            {"dtype": other, "memory_format": torch.contiguous_format},
        )
        yield "clone", [x], {"memory_format": torch.contiguous_format}
        y = tensor([2, 8, 5, 7], dtype, [280, 1, 56, 8])
        yield "clone", [y], {"memory_format": torch.channels_last}
        yield "_unsafe_view", [tensor([6, 8], dtype), [48]], {}
        joined = list(x.shape)
        dim = rng.randrange(x.dim())
        joined[dim] = size(rng, 50)
        yield "cat", [[x, tensor(joined, dtype), x], dim], {}
        yield "stack", [[x, tensor(list(x.shape), dtype)], dim], {}
        yield "constant_pad_nd", [x, [1, 2], 0], {}
        yield "flip", [x, [dim]], {}
        yield "repeat", [x, [2] * x.dim()], {}
        z = tensor(list(x.shape), dtype)
        yield (
            "slice_backward",
            [z, [*x.shape[:-1], 2 * x.shape[-1]], -1, 0, x.shape[-1], 1],
            {},
        )
        yield "select_backward", [z, [3, *x.shape], 0, 1], {}
        yield "unfold_backward", [tensor([9, 5, 4], dtype), [9, 20], 1, 4, 4], {}
        yield "native_dropout", [x, 0.1, True], {}
        yield "native_dropout_backward", [z, tensor(list(x.shape), torch.bool), 1.1], {}
        yield "diagonal_backward", [tensor([3, 8], dtype), [3, 8, 8], 0, 1, 2], {}
        yield "repeat_interleave.self_int", [z, 3, 0], {}
        yield "split_with_sizes_copy", [tensor([7, 9], dtype), [3, 4]], {}
        yield "pixel_shuffle", [tensor([2, 8, 6, 6], dtype), 2], {}
        yield "bucketize.Tensor", [z, tensor([64], dtype)], {}


def complex_numbers() -> Iterator[Case]:
    """Of two real ones, and their size and angle, which are real."""
    rng = seeded(72)
    for _ in range(12):
        dtype = rng.choice((torch.complex64, torch.complex128))
        rows, columns = rng.randint(1, 900), rng.randint(1, 900)
        x = tensor([rows, columns], dtype)
        if rng.random() < 0.3:
            x = tensor([rows, columns], dtype, [1, rows])
        yield "abs", [x], {}
        yield "angle", [x], {}
        real = tensor([rows, columns], rng.choice((torch.float32, torch.float64)))
        yield "angle", [real], {}
        yield "complex", [real, real], {}
        yield "polar", [real, real], {}
