"""Add up the gradients that the parts of a loss give to one weight, in fp32.

Autograd would add them in the dtype of the weight that the parts used: in bf16 a sum of
256 gradients is off by a tenth of itself.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def weights_of_parts(head: nn.Module, parts: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the trained weights of an output head for each part, by name.

    They replace those of the head (``torch.func.functional_call``). Those of a
    ``Linear`` under autocast are cast once for all parts, as by autocast's cache. Those
    that are used in fp32 are left out: autograd adds these up. Each part must run
    backward once in each backward.
    """
    sums = {
        name: (weight, _as_used(head, weight), _Sum(parts))
        for name, weight in head.named_parameters()
        if weight.requires_grad and _is_used_in_16_bits(weight)
    }
    for _ in range(parts):
        yield {
            name: cast("torch.Tensor", _UsedInPart.apply(*each))
            for name, each in sums.items()
        }


def _is_used_in_16_bits(weight: torch.Tensor) -> bool:
    return weight.dtype.itemsize < torch.float32.itemsize or (
        weight.dtype == torch.float32 and torch.is_autocast_enabled(weight.device.type)
    )


def _as_used(head: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as the head multiplies by it."""
    kind = weight.device.type
    if type(head) is torch.nn.Linear and torch.is_autocast_enabled(kind):
        return weight.detach().to(torch.get_autocast_dtype(kind))
    return weight.detach()


class _Sum:
    """Of as many gradients as there are parts; the last of them gets it."""

    def __init__(self, parts: int) -> None:
        self._parts = self._left = parts
        self._total: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add a part's gradient; return the sum if it is the last one."""
        if self._total is None:
            self._total = gradient.to(torch.float32, copy=True)
        else:
            self._total += gradient
        self._left -= 1
        if self._left:
            return None
        total, self._total, self._left = self._total, None, self._parts
        return total


class _UsedInPart(Function):
    """Return a weight as it is used in one part, whose gradient goes to a sum."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, as_used: torch.Tensor, total: _Sum
    ) -> torch.Tensor:
        ctx.total, ctx.dtype = total, weight.dtype
        return as_used.view_as(as_used)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, None]:
        total = ctx.total.add(gradient)
        return None if total is None else total.to(ctx.dtype), None, None
