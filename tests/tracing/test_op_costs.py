"""Arithmetic and traffic of single ops."""

from typing import Any

import pytest
import torch

from budgetfit.core.step_trace import OP_KINDS, RATES
from budgetfit.tracing.op_costs import NO_COST, op_cost

aten = torch.ops.aten
MIB = 1 << 20


def cost(op: Any, *args: Any, **kwargs: Any) -> tuple[str, float, int]:
    """Return (rate, FLOPs, bytes) of a call on meta tensors."""
    found = op_cost(op, args, kwargs, op(*args, **kwargs))
    return RATES[found.rate], found.flops, found.moved_bytes


def kind(op: Any, *args: Any, **kwargs: Any) -> str:
    """Return the kind of a call on meta tensors."""
    return OP_KINDS[op_cost(op, args, kwargs, op(*args, **kwargs)).kind]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


SQUARE = empty(512, 512)  # 1 MiB
ROWS = empty(16, 16_384)  # 1 MiB in rows of 64 KiB
SHORT = empty(2048, 128)  # 1 MiB in rows of 512 bytes
WIDE = empty(128, 2048)
IMAGE = empty(4, 64, 32, 32)
FLOAT = torch.float32


def test_a_product_is_two_operations_for_each_pair() -> None:
    product = 2 * 512**3
    assert cost(aten.mm.default, SQUARE, SQUARE) == ("fp32", product, 3 * MIB)
    assert cost(aten.addmm.default, SQUARE, SQUARE, SQUARE)[1:] == (product, 4 * MIB)


def test_products_that_add_up_cost_as_much_as_those_that_do_not() -> None:
    batch = empty(3, 512, 512)
    for op, one, other in (
        (aten._addmm_activation.default, SQUARE, SQUARE),
        (aten.addmm_.default, SQUARE, SQUARE),
        (aten.addbmm.default, batch, batch),
    ):
        pairs = one.numel() * other.shape[-1]
        assert cost(op, empty(512, 512), one, other)[:2] == ("fp32", 2 * pairs)


def test_a_product_of_complex_numbers_is_four_of_real_ones() -> None:
    x = empty(512, 512, dtype=torch.complex64)
    assert cost(aten.mm.default, x, x) == ("fp32", 4 * 2 * 512**3, 6 * MIB)


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        (torch.float32, "fp32"),
        (torch.float16, "fp16"),
        (torch.bfloat16, "bf16"),
        (torch.float64, "fp64"),
    ],
)
def test_the_rate_is_that_of_the_inputs(dtype: torch.dtype, rate: str) -> None:
    x = empty(4, 4, dtype=dtype)
    assert cost(aten.mm.default, x, x)[0] == rate


def test_plain_arithmetic_costs_what_it_reads_and_writes() -> None:
    assert cost(aten.add.Tensor, SQUARE, SQUARE) == ("none", 0, 3 * MIB)
    assert cost(aten.add_.Tensor, SQUARE, SQUARE)[2] == 3 * MIB
    assert cost(aten.relu.default, SQUARE)[2] == 2 * MIB


def test_lists_of_tensors_are_counted_through() -> None:
    both = [SQUARE, SQUARE]
    assert cost(aten._foreach_add.List, both, both)[2] == 6 * MIB


def test_views_and_ops_without_tensors_cost_nothing() -> None:
    assert cost(aten.t.default, SQUARE) == ("none", 0.0, 0)
    assert op_cost(aten.sym_size.int, (4,), {}, 4) == NO_COST


@pytest.mark.parametrize(
    ("one", "other", "groups", "flops"),
    [
        ((6, 8), (3, 8, 4), 3, 2 * 6 * 8 * 4),  # each token with one expert's weight
        ((8, 6), (6, 4), 3, 2 * 8 * 6 * 4),  # the weights' gradients
        ((3, 6, 8), (8, 4), 3, 2 * 6 * 8 * 4),
        ((3, 6, 8), (3, 8, 4), 0, 2 * 3 * 6 * 8 * 4),
    ],
)
def test_products_of_experts_cost_what_one_expert_each_does(
    one: tuple[int, ...], other: tuple[int, ...], groups: int, flops: int
) -> None:
    args = [empty(*shape, dtype=torch.bfloat16) for shape in (one, other)]
    offsets = [torch.empty(groups, dtype=torch.int32, device="meta")] if groups else []
    call = (*args, *offsets)
    found = op_cost(aten._grouped_mm.default, call, {}, args[0])
    assert (RATES[found.rate], found.flops) == ("bf16", flops)


def test_attention_is_two_products_forward() -> None:
    x = empty(2, 4, 64, 16, dtype=torch.bfloat16)
    out = (x, *(empty(1) for _ in range(8)))
    op = aten._scaled_dot_product_flash_attention.default
    products = 2 * (2 * 2 * 4 * 64 * 64 * 16)
    assert op_cost(op, (x, x, x), {}, out).flops == products
    assert op_cost(op, (x, x, x, 0.0, True), {}, out).flops == products / 2


def test_grouped_heads_of_keys_are_as_much_work_as_heads_of_their_own() -> None:
    # torch 2.11 refuses to count them.
    x, shared = (empty(2, heads, 64, 16, dtype=torch.bfloat16) for heads in (4, 2))
    out = (x, *(empty(1) for _ in range(8)))
    forward = aten._scaled_dot_product_flash_attention.default
    backward = aten._scaled_dot_product_flash_attention_backward.default
    product = 2 * (2 * 4 * 64 * 64 * 16)
    assert op_cost(forward, (x, shared, shared), {}, out).flops == 2 * product
    empty_ = empty(0)
    args = (x, x, shared, shared, x, *(empty_,) * 3, 64, 64, 0.0, False, *(empty_,) * 2)
    assert op_cost(backward, args, {}, out).flops == 5 * product


@pytest.mark.parametrize(
    ("op", "args", "moved"),
    [
        # In-place ops on lists read and write them.
        (aten._foreach_add_.List, ([SQUARE], [SQUARE]), 3),
        (aten._foreach_mul_.Scalar, ([SQUARE], 2.0), 2),
        (aten._foreach_zero_.default, ([SQUARE],), 1),
        (aten.copy_.default, (SQUARE, SQUARE), 2),
        (aten.zero_.default, (SQUARE,), 1),
        # A broadcast tensor is read once.
        (aten.add.Tensor, (SQUARE, empty(512, 1).expand(512, 512)), 2),
        # Softmax and norms pass over their input once.
        (aten._softmax.default, (SQUARE, -1, False), 2),
        # What a backward pass calls output was saved for it: read, not written.
        (aten.tanh_backward.default, (SQUARE, SQUARE), 3),
        (aten._log_softmax_backward_data.default, (SQUARE, SQUARE, -1, FLOAT), 3),
        # Softmax multiplies the two first: a tensor of its own.
        (aten._softmax_backward_data.default, (SQUARE, SQUARE, -1, FLOAT), 6),
        # Rows beyond shared memory are read for their maximum and for their sum, too.
        (aten._log_softmax.default, (ROWS, -1, False), 4),
        (aten._log_softmax_backward_data.default, (ROWS, ROWS, -1, FLOAT), 4),
        (aten._softmax_backward_data.default, (ROWS, ROWS, -1, FLOAT), 7),
        # Short rows of layer norm take as long as rows of 2 KiB.
        (aten.native_layer_norm.default, (SHORT, [128], None, None, 1e-5), 8),
        (aten.native_layer_norm.default, (WIDE, [2048], None, None, 1e-5), 2),
        # Group norm: statistics first, then the output.
        (aten.native_group_norm.default, (IMAGE, *(None,) * 2, 4, 64, 1024, 2, 0.1), 3),
        (aten.roll.default, (SQUARE, [1], [0]), 2),
        (aten.roll.default, (SQUARE, [1, 1], [0, 1]), 4),
    ],
)
def test_what_an_op_reads_and_writes(op: Any, args: Any, moved: int) -> None:
    assert cost(op, *args)[2] == pytest.approx(moved * MIB, rel=0.01)


def test_reshaping_and_unwritten_memory_are_free() -> None:
    assert (
        op_cost(aten._unsafe_view.default, (SQUARE, (512, 512)), {}, SQUARE) == NO_COST
    )
    assert op_cost(aten.empty_like.default, (SQUARE,), {}, SQUARE) == NO_COST


def test_the_fused_optimizer_moves_seven_lists() -> None:
    # Weight, gradient and two moments are read; all but the gradient are written.
    lists = ([SQUARE], [SQUARE], [SQUARE], [SQUARE], [], [empty(1)])
    kwargs = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}
    found = op_cost(aten._fused_adamw_.default, lists, kwargs, None)
    assert found.moved_bytes == pytest.approx(7 * MIB, rel=0.01)
    assert OP_KINDS[found.kind] == "optimizer"


def test_rows_are_read_and_not_the_table() -> None:
    table, rows = empty(50_000, 64), torch.empty(32, dtype=torch.int64, device="meta")
    assert cost(aten.embedding.default, table, rows)[2] == 2 * 32 * 64 * 4 + 32 * 8
    logits, target = empty(32, 50_000), rows
    out = (empty(), empty())
    found = op_cost(
        aten.nll_loss_forward.default, (logits, target, None, 1, -100), {}, out
    )
    assert found.moved_bytes < 1000


@pytest.mark.parametrize(
    ("dtype", "kernel", "groups", "side", "capability", "rearranged"),
    [
        (torch.float32, 3, 1, 8, (8, 0), True),  # in TF32
        (torch.float32, 3, 1, 8, (7, 5), False),  # without tensor cores
        (torch.float32, 3, 4, 8, (8, 0), True),
        (torch.float32, 3, 64, 8, (8, 0), False),  # depthwise
        (torch.float32, 1, 1, 8, (8, 0), False),  # a product of images as they are
        (torch.float32, 1, 1, 7, (8, 0), True),  # but of odd rows
        (torch.float16, 1, 1, 8, (8, 0), True),
        (torch.float16, 3, 4, 8, (8, 0), False),
    ],
)
def test_images_with_channels_first_are_rearranged_for_tensor_cores(
    dtype: torch.dtype,
    kernel: int,
    groups: int,
    side: int,
    capability: tuple[int, int],
    rearranged: bool,
) -> None:
    x = empty(2, 64, side, side).to(dtype)
    weight = empty(64, 64 // groups, kernel, kernel).to(dtype)
    padding = [kernel // 2] * 2
    args = (x, weight, None, [1, 1], padding, [1, 1], False, [0, 0], groups)

    def moved(images: torch.Tensor) -> int:
        call = (images, *args[1:])
        out = aten.convolution.default(*call)
        return op_cost(aten.convolution.default, call, {}, out, capability).moved_bytes

    last = moved(x.to(memory_format=torch.channels_last))
    both = 2 * x.numel() * x.element_size()
    assert moved(x) == last + (2 * both if rearranged else 0)


@pytest.mark.parametrize(
    ("groups", "channels", "expected"),
    [(1, 64, "convolution_3x3"), (2, 64, "grouped_convolution"), (64, 64, "depthwise")],
)
def test_a_convolutions_backward_is_two_of_its_forward(
    groups: int, channels: int, expected: str
) -> None:
    x = empty(2, channels, 8, 8)
    weight = empty(channels, channels // groups, 3, 3)
    shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    y = aten.convolution.default(x, weight, None, *shape)
    forward = op_cost(aten.convolution.default, (x, weight, None, *shape), {}, y)
    assert forward.flops == 2 * y.numel() * channels // groups * 9
    both = (y, x, weight, None, *shape, [True, True, False])
    backward = op_cost(aten.convolution_backward.default, both, {}, (x, weight, None))
    assert backward.flops == 2 * forward.flops
    assert backward.kernels == 2
    assert OP_KINDS[forward.kind].startswith(expected)


@pytest.mark.parametrize(
    ("filters", "last", "dtype", "forward", "backward"),
    [
        (3, False, "float16", 1.0, 1.0),
        (7, False, "float16", 0.12, 0.066),
        (7, True, "float16", 0.7, 0.43),
        (7, True, "float32", 0.26, 0.025),
    ],
)
def test_depthwise_convolutions_of_wide_filters_are_slower(
    filters: int, last: bool, dtype: str, forward: float, backward: float
) -> None:
    x = empty(2, 24, 16, 16, dtype=getattr(torch, dtype))
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = empty(24, 1, filters, filters, dtype=x.dtype)
    shape = ([1, 1], [filters // 2] * 2, [1, 1], False, [0, 0], 24)
    args = (x, weight, None, *shape)
    found = op_cost(aten.convolution.default, args, {}, x)
    assert found.efficiency == forward
    both = (x, x, weight, None, *shape, [True, True, False])
    found = op_cost(aten.convolution_backward.default, both, {}, (x, weight, None))
    assert found.efficiency == backward


def test_elements_without_vector_loads_are_counted() -> None:
    def elements(op: object, *args: Any, **kwargs: Any) -> float | None:
        rate, count, _ = cost(op, *args, **kwargs)
        return count if rate == "elements" else None

    half = empty(512, 512, dtype=torch.bfloat16)
    alone, together = SQUARE.numel(), None
    # A cast from fp32 to 16 bits has a kernel of its own, others look up each dtype.
    assert elements(aten._to_copy.default, half, dtype=FLOAT) == alone
    narrow = {"dtype": torch.bfloat16}
    assert elements(aten._to_copy.default, SQUARE, **narrow) == together
    assert elements(aten.add.Tensor, SQUARE, half) == alone
    assert elements(aten.add.Tensor, SQUARE, SQUARE) == together
    # Dimensions may have any order, but one for all tensors; each element is read once.
    assert elements(aten.add.Tensor, SQUARE.t(), SQUARE.t()) == together
    assert elements(aten.add.Tensor, SQUARE, SQUARE.t()) == alone
    assert elements(aten.mul.Tensor, SQUARE, SQUARE[0]) == alone
    assert elements(aten.mul.Tensor, SQUARE, 2.0) == together
    plain = {"memory_format": torch.contiguous_format}
    assert elements(aten.clone.default, SQUARE.t(), **plain) == alone
    assert elements(aten.clone.default, SQUARE) == together
    assert elements(aten.gt.Scalar, SQUARE, 0) == together


def test_convolutions_in_16_bits_rearrange_channels_that_are_not_last() -> None:
    def moved(x: torch.Tensor) -> int:
        weight = empty(64, 64, 1, 1, dtype=torch.float16)
        args = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return cost(aten.convolution.default, *args)[2]

    x = empty(2, 64, 8, 8, dtype=torch.float16)
    last = x.contiguous(memory_format=torch.channels_last)
    assert moved(x) - moved(last) == 4 * x.numel() * 2


def test_one_thread_block_sums_up_a_channel_of_a_batch_norm() -> None:
    def blocks(x: torch.Tensor, *, training: bool = True) -> int:
        one = empty(x.shape[1])
        args = (x, one, one, one, one, training, 0.1, 1e-5)
        y = aten.native_batch_norm.default(*args)
        found = op_cost(aten.native_batch_norm.default, args, {}, y).blocks
        sums = (one, one) if training else (empty(0), empty(0))
        back = (x, x, one, one, one, *sums, training, 1e-5, [True, True, True])
        grads = aten.native_batch_norm_backward.default(*back)
        op = aten.native_batch_norm_backward.default
        assert op_cost(op, back, {}, grads).blocks == found
        return found

    x = empty(2, 24, 8, 8)
    assert blocks(x) == 24
    assert blocks(x, training=False) == 0  # statistics are given: nothing to sum up
    assert blocks(x.contiguous(memory_format=torch.channels_last)) == 0
    assert blocks(empty(64, 24)) == 0  # channels are last
    # Where there are more than multiprocessors, too: what one block moves counts.
    assert blocks(empty(2, 256, 8, 8)) == 256
    assert blocks(empty(2, 256, 8, 8, dtype=torch.bfloat16)) == 256


@pytest.mark.parametrize(
    ("images", "weights", "expected"),
    [
        ("float32", "float32", "batch_norm"),
        ("float16", "float32", "batch_norm"),
        ("float16", "float16", "plain_batch_norm"),
        ("bfloat16", "float32", "plain_batch_norm"),
    ],
)
def test_cudnn_has_no_batch_norm_in_bf16(
    images: str, weights: str, expected: str
) -> None:
    x = empty(2, 24, 8, 8, dtype=getattr(torch, images))
    one = empty(24, dtype=getattr(torch, weights))
    args = (x, one, one, empty(24), empty(24), True, 0.1, 1e-5)
    found = op_cost(aten.native_batch_norm.default, args, {}, (x, one, one))
    assert OP_KINDS[found.kind] == expected


def test_products_with_rows_of_even_length_are_faster_than_with_odd_ones() -> None:
    def efficiency(columns: int) -> float:
        inputs = empty(512, 512, dtype=torch.float16)
        weight = empty(512, columns, dtype=torch.float16)
        out = empty(512, columns, dtype=torch.float16)
        return op_cost(aten.mm.default, (inputs, weight), {}, out).efficiency

    assert [efficiency(columns) for columns in (512, 510, 509)] == [1.0, 2.5, 1.0]


def test_kinds_of_products() -> None:
    half = empty(512, 512, dtype=torch.float16)
    odd = empty(512, 509, dtype=torch.float16)
    assert kind(aten.mm.default, half, half) == "matmul"
    assert kind(aten.mm.default, half, odd) == "unaligned_matmul"
    assert kind(aten.mm.default, SQUARE, empty(512, 509)) == "matmul"
    heads, large = empty(8, 512, 64), empty(8, 512, 512)
    assert (
        kind(aten.bmm.default, heads, heads.transpose(1, 2)) == "small_batched_matmul"
    )
    assert kind(aten.bmm.default, large, large) == "matmul"


def test_short_narrow_and_dropping_attention_is_less_efficient() -> None:
    op = aten._scaled_dot_product_flash_attention.default

    def efficiency(length: int, width: int, dropout: float = 0.0) -> float:
        x = empty(2, 4, length, width, dtype=torch.bfloat16)
        out = (x, *(empty(1) for _ in range(8)))
        return op_cost(op, (x, x, x, dropout, True), {}, out).efficiency

    assert efficiency(300, 128) == pytest.approx(0.5)
    assert efficiency(2048, 128) > efficiency(512, 128) > efficiency(512, 64)
    assert efficiency(512, 64) > efficiency(512, 64, 0.1)
