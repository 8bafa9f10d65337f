"""Gradients of the cross-entropy of logits, which autograd computes in place.

For tensor subclasses, as fake tensors are, it makes a tensor for each step.

Source: ``binary_cross_entropy_with_logits_backward`` and the same of its target in
``torch/csrc/autograd/FunctionsManual.cpp``.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

aten = torch.ops.aten
MEAN: Final = 1  # at::Reduction


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - aten's signature
        ctx: Any,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        pos_weight: Tensor | None,
        reduction: int,
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out: Tensor = aten.binary_cross_entropy_with_logits(
                x, target, weight, pos_weight, reduction
            )
        ctx.save_for_backward(x, target, weight, pos_weight)
        ctx.reduction = reduction
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, target, weight, pos_weight = ctx.saved_tensors
        into_x = into_target = None
        if ctx.needs_input_grad[0]:
            into_x = _into_x(grad, x, target, pos_weight)
            into_x = _reduced(into_x, weight, ctx.reduction)
        if ctx.needs_input_grad[1]:
            into_target = _into_target(grad, x, pos_weight)
            into_target = _reduced(into_target, weight, ctx.reduction)
        return into_x, into_target, None, None, None


# Names keep what C++ keeps to the end of an expression.


def _into_x(
    grad: Tensor, x: Tensor, target: Tensor, pos_weight: Tensor | None
) -> Tensor:
    sub, mul = _sub(), _mul()
    if pos_weight is None:
        return mul(sub(x.sigmoid(), target), grad)
    positive = pos_weight * target
    one = positive + 1
    two = sub(one, target)
    sigmoid = x.sigmoid()
    three = mul(two, sigmoid)
    result = sub(three, positive)
    del one, two, sigmoid, three
    return mul(result, grad)


def _into_target(grad: Tensor, x: Tensor, pos_weight: Tensor | None) -> Tensor:
    if pos_weight is None:
        return -x * grad
    negative = -x
    losses = logsigmoid(negative)
    return losses.sub_(logsigmoid(x).mul_(pos_weight)).mul_(grad)


def _reduced(into: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    if weight is not None:
        into = _mul()(into, weight)
    return into.div_(into.numel()) if reduction == MEAN else into


def _sub() -> Any:
    return Tensor.sub if torch.is_grad_enabled() else Tensor.sub_


def _mul() -> Any:
    return Tensor.mul if torch.is_grad_enabled() else Tensor.mul_


def logits_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    """Run ``binary_cross_entropy_with_logits`` with CUDA's gradients."""
    return _LogitsLoss.apply(x, target, weight, pos_weight, reduction)


LOSSES: Final = {"binary_cross_entropy_with_logits": logits_loss}
