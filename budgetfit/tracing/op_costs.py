"""What one aten op asks of a GPU: kind of kernels, FLOPs, bytes moved and kernels.

FLOPs of matrix products, attention and convolutions are counted here:
``torch.utils.flop_counter`` lacks ``_grouped_mm``, counts the masked half of causal
attention and ignores the groups of a convolution's backward pass. Those of other ops
are its own. Bytes are those that the kernels read and write, by the op's schema.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from budgetfit.core.step_trace import (
    OP_KINDS,
    RATES,
    SHARD_TO_DEVICE,
    SHARD_TO_HOST,
    TO_DEVICE,
    TO_HOST,
    OpKind,
)
from budgetfit.tracing.call_cache import Args, Kwargs

_RATE: Final = {
    torch.float32: RATES.index("fp32"),
    torch.float16: RATES.index("fp16"),
    torch.bfloat16: RATES.index("bf16"),
    torch.float64: RATES.index("fp64"),
    torch.complex64: RATES.index("fp32"),
    torch.complex128: RATES.index("fp64"),
}
_COMPLEX_PRODUCTS: Final = 4  # real products in one of complex numbers
_NONE: Final = RATES.index("none")
_ELEMENTS: Final = RATES.index("elements")
_KIND: Final[dict[str, int]] = {name: index for index, name in enumerate(OP_KINDS)}
_HALVES: Final = (torch.float16, torch.bfloat16)

# Products whose matrices are this small run below the rate of larger ones.
SMALL_MATRIX: Final = 128
ALIGNMENT_BYTES: Final = 8  # of rows, for kernels of cuBLAS with vector loads
# What rows at multiples of 4 bytes (BERT's 30,522 columns) reach, times what those of
# odd length do: so steps of BERT on an H100 are met (``benchmarks.recorded_steps``).
HALF_ALIGNED: Final = 2.5
# Keys at which causal attention reaches half of its rate for long sequences:
# FlashAttention-2 on an A100 296 (aiconfigurator's timings).
HALF_LENGTH: Final = 300
WIDE_HEAD: Final = 128
NARROW_HEAD: Final = 0.85  # share of the rate that narrower heads reach
DROPOUT: Final = 0.8  # and attention with dropout
# Channels below which a convolution's tensor-core tiles are not full.
FULL_CHANNELS: Final = 64
NARROWEST: Final = 0.35  # least share of the rate that narrow convolutions keep
GROUP_CHANNELS: Final = 32
WINOGRAD_WEIGHTS: Final = 9  # 3 x 3
# Longer rows of softmax do not fit into a thread block's shared memory, and are read
# again in each pass (PyTorch's SoftMax.cu).
SHARED_MEMORY: Final = 48 * 1024
# A thread block of layer norm takes as long for a shorter row, in and out (on an H100
# 24,576 rows of 768 in bf16; ``benchmarks/card_recordings``).
SHORTEST_ROW: Final = 4096
IMAGES: Final = 4  # dimensions
VECTOR_BYTES: Final = 16  # of the widest load
TF32_CAPABILITY: Final = (8, 0)  # the first with TF32, in which cuDNN convolves fp32
MOST_BLOCKS: Final = 2**15 - 1  # that a trace can hold


class OpCost(NamedTuple):
    """What one op asks of a GPU.

    Attributes:
        kind: Index into ``OP_KINDS``.
        rate: Index into ``RATES``.
        flops: Floating-point operations, or elements that are loaded one by one.
        moved_bytes: Bytes read and written.
        kernels: Kernels that are launched.
        efficiency: Share of its kind's rate that the shape of its tensors reaches.
        blocks: Thread blocks of each kernel, where there may be too few of them to use
            the whole GPU; else 0.
    """

    kind: int
    rate: int
    flops: float
    moved_bytes: int
    kernels: int
    efficiency: float = 1.0
    blocks: int = 0


_OVER_BUS: Final = (TO_HOST, TO_DEVICE, SHARD_TO_HOST, SHARD_TO_DEVICE)
NO_COST: Final = OpCost(_KIND["elementwise"], _NONE, 0.0, 0, 0)


def op_cost(
    func: OpOverload,
    args: Args,
    kwargs: Kwargs,
    out: object,
    compute_capability: tuple[int, int] = TF32_CAPABILITY,
) -> OpCost:
    """Return the cost of one call; none for view ops and ops without tensors.

    ``compute_capability``: of the GPU, (major, minor).
    """
    name = func._schema.name
    if func.is_view or name in _FREE:
        return NO_COST
    if str(func) in _OVER_BUS:  # once
        moved = tensors_in(args)[0]
        size = moved.numel() * moved.element_size()
        return OpCost(_KIND["host"], RATES.index("host"), 0.0, size, 1)
    if func.namespace == "c10d":  # a collective: its whole tensor
        sizes = [x.numel() * x.element_size() for x in tensors_in(args)]
        return OpCost(_KIND["copy"], _NONE, 0.0, max(sizes, default=0), 1)
    product = _PRODUCTS.get(func.overloadpacket)
    if product is not None:
        call, outputs = _by_name(func, args, kwargs), tensors_in(out)
        cost = product(name, call, outputs)
        more_bytes = _rearranged(call, outputs, compute_capability)
        return cost._replace(moved_bytes=cost.moved_bytes + more_bytes)
    read, written = _bytes_moved(func, args, kwargs, out)
    if not read + written:
        return NO_COST
    kind, moved_bytes, kernels = _memory_bound(name, read, written)
    if name in _AGAIN:
        more_bytes, more_kernels = _AGAIN[name](_by_name(func, args, kwargs))
        moved_bytes += more_bytes
        kernels += more_kernels
    formula = flop_registry.get(func.overloadpacket)
    flops = float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
    rate = _rate_of(tensors_in(args)) if formula else _NONE
    if name in _COPIES or torch.Tag.pointwise in func.tags:
        tensors = [x for x in tensors_in((args, kwargs, out)) if x.numel() > 1]
        if tensors and not _by_vectors(tensors, is_copy=name in _COPIES):
            flops, rate = float(tensors_in(out)[0].numel()), _ELEMENTS
    blocks = 0
    if kind == "batch_norm":
        kind, blocks = _batch_norm(_by_name(func, args, kwargs))
    return OpCost(_KIND[kind], rate, flops, moved_bytes, kernels, blocks=blocks)


def _batch_norm(call: Kwargs) -> tuple[OpKind, int]:
    """Return a batch norm's kind and its thread blocks: one per channel."""
    # Both cuDNN's kernels and PyTorch's own have one block sum up a channel. Where
    # channels are the last dimension, or with statistics given, any number works.
    # cuDNN's do not run in bf16, nor in fp16 with weights in fp16.
    inputs, weight = _first(call, "input"), call.get("weight")
    plain = inputs.dtype == torch.bfloat16 or (
        inputs.dtype == torch.float16
        and (weight is None or weight.dtype != torch.float32)
    )
    channels = int(inputs.shape[1])
    sums_up = call.get("training", call.get("train", True))
    is_last = inputs.stride()[1] == 1
    if not sums_up or is_last:
        channels = 0
    return "plain_batch_norm" if plain else "batch_norm", min(channels, MOST_BLOCKS)


def _rate_of(tensors: Sequence[Tensor]) -> int:
    dtypes = (x.dtype for x in tensors if x.is_floating_point() or x.is_complex())
    return _RATE.get(next(dtypes, torch.int8), _NONE)


# --- memory-bound ops ---

# Ops that make metadata only, or whose memory nobody writes: on CUDA no kernel runs.
_FREE: Final = frozenset(
    {
        *("aten::_unsafe_view", "aten::detach", "aten::alias", "aten::lift_fresh"),
        *("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"),
        *("aten::new_empty_strided", "aten::resize_", "aten::set_"),
    }
)
# Ops that overwrite their first argument without reading it.
_OVERWRITE: Final = frozenset(
    {
        *("aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_"),
        *("aten::uniform_", "aten::bernoulli_", "aten::_foreach_copy_"),
        *("aten::_foreach_zero_", "aten::random_", "aten::exponential_"),
    }
)
# Ops that read chosen elements of one argument, as many as they write (1) or few (0).
_CHOOSES: Final = {
    **dict.fromkeys(("aten::embedding", "aten::index", "aten::index_select"), (0, 1)),
    **dict.fromkeys(("aten::gather", "aten::_unsafe_index", "aten::take"), (0, 1)),
    **dict.fromkeys(("aten::nll_loss_forward", "aten::nll_loss2d_forward"), (0, 0)),
    **dict.fromkeys(("aten::nll_loss_backward", "aten::nll_loss2d_backward"), (1, 0)),
}
# Ops that change chosen elements of their first argument: the position of the values.
_CHANGES: Final = {
    **dict.fromkeys(("aten::index_put_", "aten::_index_put_impl_"), 2),
    **dict.fromkeys(("aten::index_add_", "aten::scatter_add_", "aten::scatter_"), 3),
    **dict.fromkeys(("aten::index_copy_", "aten::scatter_reduce_"), 3),
}
# Arguments that are written only with a loss scale: fused optimizers.
_FUSED_STEP: Final = "aten::_fused_"
# Which of its tensors a kernel of one's own reads and which it writes is not known.
_TRITON_KERNEL: Final = "budgetfit::triton_kernel"
# Memory-bound ops by name; the first pattern that is found decides.
_NAMES: Final[dict[OpKind, str]] = {
    "optimizer": "^_fused_(adam|sgd|adagrad)|^_foreach_|_step",
    "batch_norm": "batch_norm",
    "norm": "^native_layer_norm|^native_group_norm|^_fused_rms_norm",
    "softmax": "softmax",
    "pooling": "pool",
    "copy": (
        "^(clone|_to_copy|copy_|cat|index|_unsafe_index|gather|scatter|roll|stack"
        "|constant_pad|slice_|select_|upsample|embedding|repeat|flip|take|unfold"
        "|as_strided_scatter|masked_scatter)"
    ),
    "reduction": (
        "^(sum|mean|var|std|max|min|amax|amin|argmax|argmin|any|all|prod|norm|cumsum"
        "|linalg_vector_norm|logsumexp|nll_loss|count_nonzero)(?!.*backward)"
    ),
    "elementwise": "",
}
# Passes over the inputs, and kernels: batch norm computes statistics, then normalises;
# backward passes of norms compute the gradients of inputs and of parameters.
_PASSES: Final[dict[OpKind, tuple[int, int]]] = {
    "batch_norm": (2, 2),  # of either kind
    "norm_backward": (2, 2),
}


def _bytes_moved(
    func: OpOverload, args: Args, kwargs: Kwargs, out: object
) -> tuple[int, int]:
    """Return the bytes that an op reads and writes, each tensor taken once."""
    name, passes = func._schema.name, argument_passes(func)
    if name in _CHANGES:
        values = _bytes((value, 1) for value in args[_CHANGES[name] :])
        return 2 * values, values
    given = list(_values(func, args, kwargs))
    made = _bytes((value, 1) for value in _new_outputs(func, out))
    position, rows = _CHOOSES.get(name, (-1, 0))
    read = rows * made + _bytes((v, passes[n][0]) for n, v in given if n != position)
    return read, made + _bytes((value, passes[n][1]) for n, value in given)


def _memory_bound(name: str, read: int, written: int) -> tuple[OpKind, int, int]:
    """Return the kind of a memory-bound op, its bytes and its kernels."""
    op = name.partition("::")[2]
    kind = _memory_bound_kind(op)
    passes, kernels = _PASSES.get(kind, (1, 1))
    if op == "embedding_dense_backward":  # zeroed, then read and added to
        passes, kernels = 2, 2
    if op == "native_group_norm":  # statistics, factors of each channel, the output
        passes, kernels = 2, 3
    return kind, passes * read + written, kernels


def _softmax_again(call: Kwargs) -> tuple[int, int]:
    """Long rows are read once for their maximum, once for the sum of exponentials."""
    return 2 * _long_rows(call["self"], call["dim"]), 0


def _log_softmax_backward_again(call: Kwargs) -> tuple[int, int]:
    """The gradients of long rows are summed up first."""
    return _long_rows(call["grad_output"], call["dim"]), 0


def _softmax_backward_again(call: Kwargs) -> tuple[int, int]:
    """Gradients times outputs are a tensor of their own; its rows are summed up."""
    product = call["output"]
    long_rows = _long_rows(product, call["dim"])
    return 3 * stored_bytes(product) + long_rows, 1


def _long_rows(tensor: Tensor, dim: int) -> int:
    """Return the bytes of a tensor whose rows do not fit into shared memory, else 0."""
    row_bytes = tensor.shape[dim] * tensor.element_size() if tensor.dim() else 0
    return stored_bytes(tensor) if row_bytes > SHARED_MEMORY else 0


def _layer_norm_again(call: Kwargs) -> tuple[int, int]:
    """Short rows take as long as longer ones."""
    width = max(math.prod(call["normalized_shape"]), 1)
    rows, row_bytes = call["input"].numel() // width, call["input"].element_size()
    return rows * max(0, SHORTEST_ROW - 2 * width * row_bytes), 0


def _roll_again(call: Kwargs) -> tuple[int, int]:
    """Each dimension is rolled by a kernel of its own."""
    more = max(len(call["dims"]), 1) - 1
    return more * 2 * stored_bytes(call["self"]), more


# Bytes and kernels beyond one reading of the inputs and one writing of the outputs.
_AGAIN: Final[dict[str, Callable[[Kwargs], tuple[int, int]]]] = {
    **dict.fromkeys(("aten::_softmax", "aten::_log_softmax"), _softmax_again),
    "aten::_softmax_backward_data": _softmax_backward_again,
    "aten::_log_softmax_backward_data": _log_softmax_backward_again,
    "aten::native_layer_norm": _layer_norm_again,
    "aten::roll": _roll_again,
}


@functools.cache
def _memory_bound_kind(op: str) -> OpKind:
    kind = next(kind for kind, pattern in _NAMES.items() if re.search(pattern, op))
    return "norm_backward" if kind == "norm" and "backward" in op else kind


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, broadcast ones (stride 0) once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
    return count * tensor.element_size()


@functools.cache
def argument_passes(func: OpOverload) -> tuple[tuple[int, int], ...]:
    """Return how often an op reads and writes each of its arguments, by its schema."""
    name = func._schema.name
    passes = []
    for position, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if name.startswith(_FUSED_STEP) and argument.name == "grads":
            written = False  # but with a loss scale
        if name == _TRITON_KERNEL:
            written = False
        overwritten = written and (
            argument.name.startswith("out") or (position == 0 and name in _OVERWRITE)
        )
        passes.append((int(not overwritten), int(written)))
    return tuple(passes)


def cpu_cost(func: OpOverload, args: Args, kwargs: Kwargs, out: object) -> OpCost:
    """Return the cost of an op that runs on the CPU: the bytes that it moves."""
    moved = 0 if func.is_view else sum(_bytes_moved(func, args, kwargs, out))
    return OpCost(_KIND["cpu"], _NONE, 0.0, moved, 0)


def tensor_passes(
    func: OpOverload, args: Args, kwargs: Kwargs, out: object
) -> Iterator[tuple[object, int]]:
    """Yield each argument and new output, and how often the op passes over it."""
    passes = argument_passes(func)
    for position, value in _values(func, args, kwargs):
        yield value, sum(passes[position])
    yield from ((value, 1) for value in _new_outputs(func, out))


def _values(
    func: OpOverload, args: Args, kwargs: Kwargs
) -> Iterator[tuple[int, object]]:
    """Yield the position and value of each given argument."""
    yield from enumerate(args)
    if kwargs:
        names = {a.name: n for n, a in enumerate(func._schema.arguments)}
        for name, value in kwargs.items():
            yield names[name], value


def _bytes(values: Iterable[tuple[object, int]]) -> int:
    return sum(
        times * stored_bytes(tensor)
        for value, times in values
        if times
        for tensor in tensors_in(value)
    )


def _new_outputs(func: OpOverload, out: Any) -> Iterator[object]:
    """Yield the outputs that are no arguments."""
    returns = func._schema.returns
    outputs = out if len(returns) > 1 else (out,)
    for returned, value in zip(returns, outputs, strict=False):
        if returned.alias_info is None:
            yield value


# --- elements one by one ---

_COPIES: Final = frozenset({"aten::_to_copy", "aten::copy_", "aten::clone"})


def _by_vectors(tensors: Sequence[Tensor], *, is_copy: bool) -> bool:
    """Return whether an elementwise kernel of PyTorch loads several elements at once.

    It does where all tensors are dense and of one layout, and no thread has to look up
    their dtypes (``gpu_kernel_impl`` in CUDALoops.cuh). Of casts only those from fp32
    to 16 bits have a kernel of their own (``direct_copy_kernel_cuda`` in Copy.cu).

    Args:
        tensors: The arguments and the output, which is last.
        is_copy: Whether any two dtypes need a cast, not just floating-point ones.
    """
    dtypes = {x.dtype for x in tensors if is_copy or x.is_floating_point()}
    narrows = is_copy and tensors[-1].dtype in _HALVES
    if len(dtypes) > 1 and not (narrows and torch.float32 in dtypes):
        return False
    layouts = {_layout(tensor) for tensor in tensors}
    return len(layouts) == 1 and _is_dense(layouts.pop())


def _layout(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the size and stride of each dimension of more than one element."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple((size, stride) for size, stride in dims if size > 1)


def _is_dense(layout: Iterable[tuple[int, int]]) -> bool:
    """Return whether elements lie side by side, in any order of the dimensions."""
    expected = 1
    for size, stride in sorted(layout, key=lambda dim: dim[1]):
        if stride != expected:
            return False
        expected *= size
    return True


# --- products ---


def _by_name(func: OpOverload, args: Args, kwargs: Kwargs) -> Kwargs:
    """Return all arguments of a call by name, with their defaults."""
    values = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            values[argument.name] = args[position]
        else:
            values[argument.name] = kwargs.get(argument.name, argument.default_value)
    return values


def _first(call: Kwargs, *names: str) -> Tensor:
    """Return the first of some arguments that an op has."""
    return next(call[name] for name in names if name in call)


def _matmul(_name: str, call: Kwargs, outputs: list[Tensor]) -> OpCost:
    one = _first(call, "mat1", "batch1", "self")
    other = _first(call, "mat2", "batch2")
    batch = math.prod(one.shape[:-2])  # of matrices
    rows, inner, columns = one.shape[-2], one.shape[-1], other.shape[-1]
    moved_bytes = sum(map(stored_bytes, (*tensors_in(call), *outputs)))
    kind, efficiency = "matmul", 1.0
    alignment = min(map(_alignment, (one, other, *outputs)))
    if batch > 1 and min(rows, inner, columns) <= SMALL_MATRIX:
        kind = "small_batched_matmul"
    elif one.dtype in _HALVES and alignment < ALIGNMENT_BYTES:
        kind = "unaligned_matmul"
        efficiency = HALF_ALIGNED if 2 * alignment == ALIGNMENT_BYTES else 1.0
    flops = 2.0 * batch * rows * inner * columns
    if one.is_complex():
        flops *= _COMPLEX_PRODUCTS
    return OpCost(
        _KIND[kind], _rate_of([one]), flops, moved_bytes, 1, efficiency=efficiency
    )


def _alignment(matrix: Tensor) -> int:
    """Return of how many bytes all rows (or columns) start at multiples."""
    steps = [x * matrix.element_size() for x in matrix.stride()[-2:] if x > 1]
    return math.gcd(ALIGNMENT_BYTES, *steps)


def _grouped_mm(_name: str, call: Kwargs, outputs: list[Tensor]) -> OpCost:
    """Each row, or each column, is multiplied with the matrix of its own group."""
    one, other = call["self"], call["mat2"]
    flops = 2.0 * one.numel() * other.shape[-1]
    if one.dim() > other.dim():  # columns are grouped
        flops /= one.shape[0]
    moved_bytes = sum(map(stored_bytes, (one, other, *outputs)))
    return OpCost(_KIND["matmul"], _rate_of([one]), flops, moved_bytes, 1)


def _attention(name: str, call: Kwargs, outputs: list[Tensor]) -> OpCost:
    """Attention: causal work is half, and short sequences keep below the rate."""
    query, key = call["query"], call["key"]
    heads_first = "scaled_dot_product" in name
    length_dim, heads_dim = (-2, -3) if heads_first else (-3, -2)
    queries, keys = query.shape[length_dim], key.shape[length_dim]
    if query.dim() == 3:  # noqa: PLR2004 - sequences behind each other, by offsets
        queries = call.get("max_q") or call["max_seqlen_q"]
        keys = call.get("max_k") or call["max_seqlen_k"]
    of_sample = query.shape[-1] * query.shape[heads_dim] * queries
    batch = query.numel() // max(of_sample, 1)
    width = query.shape[-1]
    pairs = batch * query.shape[heads_dim] * queries * keys
    causal = bool(call.get("is_causal")) or call.get("custom_mask_type") == 1
    flops = 4.0 * pairs * width * (0.5 if causal else 1)
    efficiency = 1 / (1 + HALF_LENGTH / max(keys, 1) * (1 if causal else 0.5))
    efficiency *= 1 if width >= WIDE_HEAD else NARROW_HEAD
    efficiency *= DROPOUT if call.get("dropout_p") else 1
    backward = "backward" in name
    library = next(x for x in ("cudnn", "efficient", "flash") if x in name)
    kind = f"{library}_attention" + ("_backward" if backward else "")
    tensors = [x for x in call.values() if isinstance(x, torch.Tensor)]
    moved_bytes = sum(map(stored_bytes, (*tensors, *outputs)))
    return OpCost(
        _KIND[kind],
        _rate_of([query]),
        flops * (2.5 if backward else 1),  # five products instead of two
        moved_bytes,
        3 if backward else 1,
        efficiency,
    )


def _convolution(_name: str, call: Kwargs, outputs: list[Tensor]) -> OpCost:
    inputs, weight = _first(call, "input", "self"), _first(call, "weight")
    backward = "grad_output" in call
    output = call["grad_output"] if backward else outputs[0]
    passes = sum(call["output_mask"][:2]) if backward else 1
    moved_bytes = sum(map(stored_bytes, (inputs, weight, output)))
    spread = inputs if call.get("transposed") else output
    flops = 2.0 * spread.numel() * math.prod(weight.shape[1:])
    groups = call.get("groups") or 1
    per_group = inputs.shape[1] // groups
    ending, efficiency = "_backward" if backward else "", 1.0
    if groups > 1 and per_group == 1:
        kind = "depthwise_convolution"
        efficiency = _of_wide_filters(inputs, weight)[backward]
    elif groups > 1:
        kind = "grouped_convolution"
        efficiency = min(1.0, max(per_group, 8) / GROUP_CHANNELS)
    else:
        square = math.prod(weight.shape[2:]) == WINOGRAD_WEIGHTS
        kind = ("convolution_3x3" if square else "convolution") + ending
        narrow = min(weight.shape[:2])
        efficiency = max(NARROWEST, min(1.0, narrow / FULL_CHANNELS))
    return OpCost(
        _KIND[kind],
        _rate_of([inputs]) if kind != "depthwise_convolution" else _NONE,
        flops * passes,
        moved_bytes * passes,
        max(passes, 1),
        efficiency,
    )


def _rearranged(
    call: Kwargs, outputs: list[Tensor], compute_capability: tuple[int, int]
) -> int:
    """Return the bytes moved around a convolution on tensor cores, else 0."""
    # They want the channels last: images of another layout are rearranged before and
    # after (``nchwToNhwcKernel`` in cuDNN, in TF32 as in 16 bits).
    if "groups" not in call:
        return 0
    inputs, weight = _first(call, "input", "self"), call["weight"]
    groups = call["groups"]
    if inputs.dtype in _HALVES:  # grouped ones: not in the libraries of published rows
        rearranges = groups == 1
    elif inputs.dtype == torch.float32 and compute_capability >= TF32_CAPABILITY:
        # Filters of 1 x 1 are products of the images as they are, if aligned.
        pixels = math.prod(inputs.shape[2:]) * inputs.element_size()
        is_product = math.prod(weight.shape[2:]) == 1 and pixels % VECTOR_BYTES == 0
        is_depthwise = 1 < groups == inputs.shape[1]
        rearranges = not is_product and not is_depthwise
    else:
        rearranges = False
    if not rearranges or _channels_last(inputs):
        return 0
    backward = "grad_output" in call
    output = call["grad_output"] if backward else outputs[0]
    passes = sum(call["output_mask"][:2]) if backward else 1
    return passes * 2 * (stored_bytes(inputs) + stored_bytes(output))


def _of_wide_filters(inputs: Tensor, weight: Tensor) -> tuple[float, float]:
    """Return the shares of the rate of depthwise convolutions, forward and backward."""
    # With channels first, PyTorch takes its own kernel for images, but for filters of
    # 1, 3 and 5 (``check_cudnn_depthwise_workload_with_filter`` in Convolution.cpp).
    # Shares are those of filters of 7 x 7 on an H100 (``benchmarks/card_recordings``).
    if weight.dim() != IMAGES or max(weight.shape[2:]) in (1, 3, 5):
        return 1.0, 1.0
    if not _channels_last(inputs):
        return 0.12, 0.066
    return (0.7, 0.43) if inputs.dtype in _HALVES else (0.26, 0.025)


def _channels_last(tensor: Tensor) -> bool:
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout)


_ATEN: Final = torch.ops.aten
_PRODUCTS: Final[dict[Any, Callable[[str, Kwargs, list[Tensor]], OpCost]]] = {
    **dict.fromkeys((_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm), _matmul),
    **dict.fromkeys((_ATEN.addmm_, _ATEN.addbmm, _ATEN.baddbmm_), _matmul),
    _ATEN._addmm_activation: _matmul,
    _ATEN._grouped_mm: _grouped_mm,
    **dict.fromkeys(
        [
            op
            for op in flop_registry
            if "attention" in str(op) and "flex" not in str(op)
        ],
        _attention,
    ),
    **dict.fromkeys([op for op in flop_registry if "conv" in str(op)], _convolution),
}


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in (nested) arguments, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: object, into: list[Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, into)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, into)
