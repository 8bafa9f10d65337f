"""Adapters of peft, as far as they decide memory, in plain torch.

peft keeps the adapter's weights in fp32 beside a bf16 model: what enters an adapter is
cast, and its result is added in fp32 and cast back.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn


class Lora(nn.Module):
    """A frozen linear layer with a trained low-rank update beside it."""

    def __init__(self, base: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        options = {"bias": False, "dtype": dtype, "device": base.weight.device}
        self.a = nn.Linear(base.in_features, rank, **options)
        self.b = nn.Linear(rank, base.out_features, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        update = self.b(self.a(x.to(self.a.weight.dtype)))
        return (result + update * 2.0).to(result.dtype)


class Scaled(nn.Module):
    """IA3: a trained vector scales what leaves (or enters) a frozen layer."""

    def __init__(self, base: nn.Linear, *, before: bool) -> None:
        super().__init__()
        self.base = base
        self.before = before
        size = base.in_features if before else base.out_features
        self.scale = nn.Parameter(
            torch.ones(size, dtype=torch.float32, device=base.weight.device)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            return self.base((x * self.scale).to(x.dtype))
        result = self.base(x)
        return (result * self.scale).to(result.dtype)


class TrainedBias(nn.Module):
    """A trained bias behind a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.bias = nn.Parameter(
            torch.zeros(base.out_features, device=base.weight.device)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return (result + self.bias).to(result.dtype)


def freeze(model: nn.Module) -> None:
    """Train nothing."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def wrap(
    model: nn.Module, names: Iterable[str], make: Callable[[nn.Linear], nn.Module]
) -> None:
    """Put ``make(layer)`` in place of every layer whose last name is in ``names``."""
    names = set(names)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, make(child))
