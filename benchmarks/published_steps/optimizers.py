"""The optimizers of the published steps, where they are not torch's of today."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def sgd_nesterov(params: Any) -> torch.optim.Optimizer:
    """Timm's and NVIDIA's optimizer for images, before torch 2.0: op by op.

    Its momentum is there from the start, as in every step but the first.
    """
    optimizer = torch.optim.SGD(
        params, lr=1e-4, momentum=0.9, nesterov=True, foreach=False
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            momentum = torch.zeros_like(parameter)
            optimizer.state[parameter]["momentum_buffer"] = momentum
    return optimizer


def adamw_foreach(params: Any) -> torch.optim.Optimizer:
    """PyTorch's default AdamW."""
    return torch.optim.AdamW(params, lr=1e-4, foreach=True)


class SquadAdam(torch.optim.Optimizer):
    """What follows backward in NVIDIA's ``run_squad.py``, which Lambda runs.

    Gradients are clipped by their norm. In fp32 a step is taken op by op (BertAdam).
    fp16 weights have fp32 copies, whose step is fused (apex's O2 and FusedAdam).
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-5})
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if weight.dtype == torch.half:
                    state["copy"] = weight.detach().float()
                    state["gradient"] = torch.zeros_like(state["copy"])
                else:
                    state["m"] = torch.zeros_like(weight)
                    state["v"] = torch.zeros_like(weight)
        copies = [state["copy"] for state in self.state.values() if "copy" in state]
        self._fused = torch.optim.AdamW(copies, fused=True) if copies else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Clip gradients and step; return what the closure does, as torch's do."""
        loss = closure() if closure else None
        weights = [
            weight
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        gradients = [weight.grad for weight in weights]
        if self._fused is None:
            _clip(gradients)
            for weight, gradient in zip(weights, gradients, strict=True):
                _bert_adam(weight, gradient, **self.state[weight])
            return loss
        states = [self.state[weight] for weight in weights]
        unscaled = [state["gradient"] for state in states]
        torch._foreach_copy_(unscaled, gradients)
        _clip(unscaled)
        for state in states:
            state["copy"].grad = state["gradient"]
        self._fused.step()
        torch._foreach_copy_(weights, [state["copy"] for state in states])
        return loss


def _clip(gradients: list[Any]) -> None:
    torch._foreach_norm(gradients)
    torch._foreach_mul_(gradients, 0.5)


def _bert_adam(
    weight: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    m.mul_(0.9).add_(gradient, alpha=0.1)
    v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    update = m / (v.sqrt() + 1e-6)
    update += 0.01 * weight
    weight.add_(-(1e-5 * update))


OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd_nesterov": sgd_nesterov,
    "adamw_foreach": adamw_foreach,
    "squad_adam": SquadAdam,
}
