"""FLOPs and bytes moved of one aten op, for the roofline.

FLOPs come from ``torch.utils.flop_counter``, which lacks ``_grouped_mm``; bytes are
those of every tensor read or written. Ops without tensors and view ops cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

from budgetfit.core.step_trace import RATES, TO_DEVICE, TO_HOST

if TYPE_CHECKING:
    from collections.abc import Callable

_RATE = {
    torch.float32: RATES.index("fp32"),
    torch.float16: RATES.index("fp16"),
    torch.bfloat16: RATES.index("bf16"),
    torch.float64: RATES.index("fp64"),
}
_NONE = RATES.index("none")
_HOST = RATES.index("host")


def _grouped_mm_flops(
    one: torch.Tensor, other: torch.Tensor, *_: object, **_kwargs: object
) -> int:
    """Each row, or each column, is multiplied with the matrix of its own group."""
    flops = 2 * one.numel() * other.shape[-1]
    columns_are_grouped = one.dim() > other.dim()
    return flops // one.shape[0] if columns_are_grouped else flops


def _all_heads(formula: Callable[..., int], query: int) -> Callable[..., int]:
    """Expand keys and values to the heads of the queries (argument ``query``).

    Grouped-query attention has the same FLOPs; torch 2.11 refuses to count it.
    """

    def flops(*args: Any, **kwargs: Any) -> int:
        heads = args[query].shape[1]
        shapes = [x.shape if isinstance(x, torch.Tensor) else x for x in args]
        for position in (query + 1, query + 2):
            batch, _, length, width = shapes[position]
            shapes[position] = torch.Size((batch, heads, length, width))
        return formula(*shapes, **kwargs)

    return flops


_ATEN = torch.ops.aten
_QUERY = {
    _ATEN._scaled_dot_product_flash_attention: 0,
    _ATEN._scaled_dot_product_flash_attention_backward: 1,
    _ATEN._scaled_dot_product_cudnn_attention: 0,
    _ATEN._scaled_dot_product_cudnn_attention_backward: 1,
}
_FORMULAS = {
    **flop_registry,
    _ATEN._grouped_mm: _grouped_mm_flops,
    **{op: _all_heads(flop_registry[op], query) for op, query in _QUERY.items()},
}


def op_cost(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
) -> tuple[int, float, int]:
    """Return (rate index, floating-point operations, bytes moved) of one op."""
    tensors: list[torch.Tensor] = []
    _collect(args, tensors)
    _collect(tuple(kwargs.values()), tensors)
    inputs = len(tensors)
    _collect(out, tensors)
    if not tensors or func.is_view:
        return _NONE, 0.0, 0
    if str(func) in (TO_HOST, TO_DEVICE):  # crosses the bus once
        return _HOST, 0.0, tensors[0].numel() * tensors[0].element_size()
    moved_bytes = sum(x.numel() * x.element_size() for x in tensors)
    formula = _FORMULAS.get(func._overloadpacket)
    if formula is None:
        return _NONE, 0.0, moved_bytes
    flops = float(formula(*args, **kwargs, out_val=out))
    for x in tensors[:inputs]:
        if x.is_floating_point():
            return _RATE.get(x.dtype, _NONE), flops, moved_bytes
    return _NONE, flops, moved_bytes


def _collect(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, into)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in (nested) arguments, in order."""
    found: list[torch.Tensor] = []
    for item in value if isinstance(value, tuple) else (value,):
        _collect(tuple(item.values()) if isinstance(item, dict) else item, found)
    return found
