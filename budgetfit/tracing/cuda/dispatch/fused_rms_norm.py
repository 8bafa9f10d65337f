"""CUDA's fused RMS norm (``_fused_rms_norm``), which a CPU decomposes.

Source: ``rms_norm_symint`` in ``aten/src/ATen/native/layer_norm.cpp``, the formula of
``_fused_rms_norm`` in ``derivatives.yaml``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten
IMAGE_DIMS, VOLUME_DIMS = 4, 5


class _FusedRmsNorm(torch.autograd.Function):
    """The op and its gradient, for which autograd has a formula on CUDA only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None,
        eps: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and rstd, in fp32."""
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = list(shape)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)  # else a tensor of zeros would be allocated
        return out, rstd

    @staticmethod
    def backward(
        ctx: Any,
        grad: Tensor,
        _: Tensor,
    ) -> tuple[Tensor | None, None, Tensor | None, None]:
        """Return the gradients of input and weight."""
        x, rstd, weight = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        into_x, into_weight = aten._fused_rms_norm_backward(
            grad, x, ctx.shape, rstd, weight, mask
        )
        return into_x, None, into_weight, None


def fused_rms_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run ``_fused_rms_norm`` as on CUDA."""
    return _FusedRmsNorm.apply(x, shape, weight, eps)


def is_fused(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether ``rms_norm`` uses the fused op (not for channels-last inputs)."""
    if weight is not None and weight.dtype != x.dtype:
        return False
    formats = {
        IMAGE_DIMS: torch.channels_last,
        VOLUME_DIMS: torch.channels_last_3d,
    }
    last = formats.get(x.dim())
    return last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last)
