"""Meta kernels for ops that torch's fake tensors reject but CUDA supports."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten


def _grouped_product(
    one: torch.Tensor, other: torch.Tensor, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the output of a grouped GEMM in fp32 or fp16."""
    # CUDA multiplies group by group into one tensor, with rows aligned to 16 bytes.
    # Source: ``create_grouped_gemm_output_tensor`` in ``ATen/native/GroupedMMUtils.h``.
    rows, columns = one.shape[-2], other.shape[-1]
    alignment = 16 // one.element_size()
    width = -(-columns // alignment) * alignment
    if one.dim() != other.dim():  # the groups share rows or columns
        return torch.empty_strided((rows, columns), (width, 1), dtype=one.dtype)
    groups = one.shape[0] if offsets is None else offsets.shape[0]
    return torch.empty_strided(
        (groups, rows, columns), (rows * width, width, 1), dtype=one.dtype
    )


def _grouped_mm(one: torch.Tensor, *args: Any, **kwargs: Any) -> object:
    if one.dtype == torch.bfloat16:
        return None  # torch's meta kernel supports these
    return _grouped_product(one, *args, **kwargs)


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=wide)


def _histc(x: torch.Tensor, bins: int = 100, *_: object) -> torch.Tensor:
    """Return the counts, also of integers, which a CPU does not count."""
    return x.new_empty(bins)


def _multilabel_margin(
    scores: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and which classes are targets."""
    rows = () if reduction else scores.shape[:-1]
    return scores.new_empty(rows), scores.new_empty(target.shape)


def _multi_margin_backward(
    _: torch.Tensor, scores: torch.Tensor, *__: object
) -> torch.Tensor:
    return torch.empty(scores.shape, dtype=scores.dtype)  # also in 16 bits


def _batch_norm(x: torch.Tensor, *further: object) -> object:
    """Evaluation, too, saves the statistics: ``native/cuda/Normalization.cu``."""
    *_, train, _momentum, _eps = further
    if train:
        return None
    half = x.dtype in (torch.float16, torch.bfloat16)
    statistics = torch.float32 if half else x.dtype
    saved = [x.new_empty(x.shape[1], dtype=statistics) for _ in range(2)]
    return torch.empty_like(x), *saved


# The cells' outputs end with a workspace of four or five gates (native/cuda/RNN.cu).
# Torch's meta kernels need a bias.


def _lstm_cell(
    gates: torch.Tensor, _: object, cell: torch.Tensor, *__: object
) -> object:
    return torch.empty_like(cell), torch.empty_like(cell), torch.empty_like(gates)


def _gru_cell(
    gates: torch.Tensor, _: object, state: torch.Tensor, *__: object
) -> object:
    rows, columns = state.shape
    return torch.empty_like(state), gates.new_empty((rows, 5 * columns))


def _gru_cell_backward(
    grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input gates, hidden gates, state and biases."""
    rows, columns = grad.shape
    gates = [workspace.new_empty((rows, 3 * columns)) for _ in range(2)]
    biases = [workspace.new_empty(3 * columns) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad), *biases


# Torch's meta kernels of sparse tensors have no elements.


def _sparse(
    indices: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    is_coalesced: bool | None = None,
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, check_invariants=False, is_coalesced=is_coalesced
    )


def _sparse_clone(x: torch.Tensor, **_: object) -> torch.Tensor | None:
    """Autograd keeps a sparse gradient; that of a tensor subclass it would copy."""
    if x.layout is not torch.sparse_coo:
        return None
    indices, values = x._indices(), x._values()
    node = torch._C._current_autograd_node()
    if node is None or "AccumulateGrad" not in node.name():
        indices, values = indices.clone(), values.clone()
    return _sparse(indices, values, x.shape)


def _sparse_sum(one: object, other: object, **_: object) -> torch.Tensor | None:
    """Join the elements of two sparse gradients; numbers are added to other tensors."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    if not one.is_sparse or not other.is_sparse:
        return None
    indices = torch.cat([one._indices(), other._indices()], 1)
    return _sparse(indices, torch.cat([one._values(), other._values()]), one.shape)


def _bag_backward(
    grad: torch.Tensor, indices: torch.Tensor, *further: Any
) -> torch.Tensor | None:
    """Return a row of the gradient for each index, if it is sparse."""
    *_, rows, _counted, _mode, sparse = further[:8]
    if not sparse:
        return None
    values = grad.new_empty((indices.numel(), grad.shape[1]))
    size = (rows, grad.shape[1])
    return _sparse(indices.view(1, -1), values, size)


def _coalesce(x: torch.Tensor) -> torch.Tensor:
    """Return as many elements: how many are equal only their values tell."""
    return _sparse(
        x._indices().clone(), x._values().clone(), x.shape, is_coalesced=True
    )


def _sparse_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    if not mask.is_sparse:
        return None
    values = mask._values()
    return _sparse(mask._indices().clone(), x.new_empty(values.shape), x.shape)


# Return the outputs of an op; None: torch's own meta kernel supports this call.
META_KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten._fused_rms_norm.default: _rms_norm,
    aten.histc.default: _histc,
    aten.multi_margin_loss_backward.default: _multi_margin_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin,
    aten.multilabel_margin_loss_backward.default: _multi_margin_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten.clone.default: _sparse_clone,
    aten.add.Tensor: _sparse_sum,
    aten._embedding_bag_backward.default: _bag_backward,
    aten._coalesce.default: _coalesce,
    aten.sparse_mask.default: _sparse_mask,
}
