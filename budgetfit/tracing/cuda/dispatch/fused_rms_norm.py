"""CUDA's fused RMS norm (``_fused_rms_norm``), which a CPU decomposes.

Source: ``rms_norm_symint`` in ``aten/src/ATen/native/layer_norm.cpp``, the formula of
``_fused_rms_norm`` in ``derivatives.yaml``, its
``infinitely_differentiable_native_rms_norm_backward`` in ``FunctionsManual.cpp``.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
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
        ctx.set_materialize_grads(False)  # else a tensor of zeros would be allocated
        return out, rstd

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_of_rstd: Tensor | None
    ) -> tuple[Tensor | None, None, Tensor | None, None]:
        """Return the gradients of input and weight."""
        saved = x, rstd, weight = ctx.saved_tensors
        wanted = [_is_wanted(node) for node, _ in ctx.next_functions]
        mask = wanted if weight is not None else [*wanted, False]
        if torch.is_grad_enabled() or grad_of_rstd is not None:
            given = grad, grad_of_rstd
            into_x, into_weight = _differentiable(given, saved, ctx.shape, mask)
            return into_x, None, into_weight, None
        into_x, into_weight = aten._fused_rms_norm_backward(
            grad, x, ctx.shape, rstd, weight, mask
        )
        return into_x, None, into_weight, None


def _is_wanted(node: Any) -> bool:
    """Return whether the pass needs this gradient, as C++ asks; ``ctx`` does not."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that autograd.grad returns the gradient of
        return True


def _differentiable(
    grads: tuple[Tensor | None, Tensor | None],
    saved: tuple[Tensor, Tensor, Tensor | None],
    shape: list[int],
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return gradients of which there are gradients again."""
    # Names keep what C++ keeps, to the end of an expression or of the function.
    (grad, grad_of_rstd), (x, rstd, weight) = grads, saved
    outer, width = x.dim() - len(shape), math.prod(shape)
    cubed = rstd.pow(3)
    scaled = grad if grad is None or weight is None else grad * weight
    parts = []
    if mask[0] and scaled is not None:
        dims = list(range(outer, x.dim()))
        total = (x * scaled).sum(dims, keepdim=True)
        one = x * cubed
        two = one / width
        three = two * total
        four = rstd * scaled
        parts.append(four - three)
        del one, two, three, four
    if mask[0] and grad_of_rstd is not None:
        one = x * grad_of_rstd
        two = one / width
        three = -two
        parts.append(three * cubed)
        del one, two, three
    into_x = parts[0] + parts[1] if len(parts) > 1 else next(iter(parts), None)
    del parts
    into_weight = None
    if mask[1] and grad is not None:
        normalized = x * rstd
        full = grad * normalized
        into_weight = full.sum(list(range(outer))) if outer else full
    return into_x, into_weight


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
    formats = {IMAGE_DIMS: torch.channels_last, VOLUME_DIMS: torch.channels_last_3d}
    last = formats.get(x.dim())
    return last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last)
