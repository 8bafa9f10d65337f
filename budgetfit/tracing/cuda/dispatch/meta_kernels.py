"""Meta kernels for ops that torch's fake tensors reject but CUDA supports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from budgetfit.tracing.cuda.dispatch.recurrent_layers import (
    fused_gru_cell,
    fused_gru_cell_backward,
    fused_lstm_cell,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten


def _grouped_product(
    one: torch.Tensor, other: torch.Tensor, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the output of a grouped GEMM in fp32 or fp16.

    CUDA multiplies group by group into one tensor, with rows aligned to 16 bytes.
    Source: ``create_grouped_gemm_output_tensor`` in ``ATen/native/GroupedMMUtils.h``.
    """
    rows, columns = one.shape[-2], other.shape[-1]
    alignment = 16 // one.element_size()
    width = -(-columns // alignment) * alignment
    if one.dim() != other.dim():  # the groups share rows or columns
        return torch.empty_strided((rows, columns), (width, 1), dtype=one.dtype)
    groups = one.shape[0] if offsets is None else offsets.shape[0]
    return torch.empty_strided(
        (groups, rows, columns), (rows * width, width, 1), dtype=one.dtype
    )


def _grouped_mm(one: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if one.dtype == torch.bfloat16:
        return None  # torch's meta kernel supports these
    return _grouped_product(one, *args, **kwargs)


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    rstd = x.new_empty(rows, dtype=torch.float32)
    return x.new_empty(x.shape), rstd


def _lstm_cell(*args: Any, **_: object) -> Any:
    return fused_lstm_cell(args[0], args[2])


def _gru_cell(*args: Any, **_: object) -> Any:
    return fused_gru_cell(args[0], args[2])


def _gru_cell_backward(*args: Any, **_: object) -> Any:
    return fused_gru_cell_backward(args[0], args[1], has_bias=args[2])


# Return the outputs of an op; None: torch's own meta kernel supports this call.
META_KERNELS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten._fused_rms_norm.default: _rms_norm,
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
