"""Arithmetic and traffic of single ops."""

# ruff: noqa: ANN401 - any call

from typing import Any

import pytest
import torch

from budgetfit.core.step_trace import RATES
from budgetfit.tracing.op_costs import op_cost

aten = torch.ops.aten
MIB = 1 << 20


def cost(op: Any, *args: Any, **kwargs: Any) -> tuple[str, float, int]:
    """Return (rate, FLOPs, bytes) of a call on meta tensors."""
    rate, flops, moved_bytes = op_cost(op, args, kwargs, op(*args, **kwargs))
    return RATES[rate], flops, moved_bytes


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


SQUARE = empty(512, 512)  # 1 MiB


def test_a_product_is_two_operations_for_each_pair() -> None:
    product = 2 * 512**3
    assert cost(aten.mm.default, SQUARE, SQUARE) == ("fp32", product, 3 * MIB)
    assert cost(aten.addmm.default, SQUARE, SQUARE, SQUARE)[1:] == (product, 4 * MIB)


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
    assert cost(aten._foreach_add.List, both, both)[2] == 6 * MIB  # noqa: SLF001


def test_views_and_ops_without_tensors_cost_nothing() -> None:
    assert cost(aten.t.default, SQUARE) == ("none", 0.0, 0)
    assert op_cost(aten.sym_size.int, (4,), {}, 4) == (RATES.index("none"), 0.0, 0)


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
    rate, counted, _ = op_cost(aten._grouped_mm.default, call, {}, args[0])  # noqa: SLF001
    assert (RATES[rate], counted) == ("bf16", flops)


def test_attention_is_two_products_forward() -> None:
    x = empty(2, 4, 64, 16, dtype=torch.bfloat16)
    out = (x, *(empty(1) for _ in range(8)))
    op = aten._scaled_dot_product_flash_attention.default  # noqa: SLF001
    _, flops, _ = op_cost(op, (x, x, x), {}, out)
    assert flops == 2 * (2 * 2 * 4 * 64 * 64 * 16)


def test_grouped_heads_of_keys_are_as_much_work_as_heads_of_their_own() -> None:
    # torch 2.11 refuses to count them.
    x, shared = (empty(2, heads, 64, 16, dtype=torch.bfloat16) for heads in (4, 2))
    out = (x, *(empty(1) for _ in range(8)))
    forward = aten._scaled_dot_product_flash_attention.default  # noqa: SLF001
    backward = aten._scaled_dot_product_flash_attention_backward.default  # noqa: SLF001
    product = 2 * (2 * 4 * 64 * 64 * 16)
    assert op_cost(forward, (x, shared, shared), {}, out)[1] == 2 * product
    args = (x, x, shared, shared, x)
    assert op_cost(backward, args, {}, out)[1] == 5 * product
