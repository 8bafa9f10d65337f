"""Small models of several architectures, with dropout, and a batch for each."""

from functools import partial
from typing import Any

import torch
from torch import nn

from tests import models
from tests.models import text

BLOCKS = 6
gpt2 = partial(models.gpt2, n_layer=BLOCKS)
llama = partial(models.llama, num_hidden_layers=BLOCKS, attention_dropout=0.1)
t5 = partial(models.t5, num_layers=BLOCKS)
vit = partial(models.vit, num_hidden_layers=BLOCKS)


class Block(nn.Module):
    """A plain residual block with dropout, that returns a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(
        self, hidden_states: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, float]:
        inner = self.dropout(torch.tanh(self.up(hidden_states)))
        return hidden_states + scale * self.down(inner), scale


class Stack(nn.Module):
    """A ModuleList whose parent hands each block another argument, all by keyword."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x, _ = layer(hidden_states=x, scale=1.0 + number)
        return nn.functional.cross_entropy(self.head(x), labels)


class Mean(nn.Module):
    """What a Sequential has for a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dtype=torch.float32)


def sequential() -> nn.Module:
    """A flat Sequential that ends in a loss; its blocks are leaves."""
    layers = [
        layer
        for _ in range(BLOCKS // 2)
        for layer in (nn.Linear(16, 16), nn.Dropout(0.1))
    ]
    return nn.Sequential(*layers, nn.Linear(16, 4), Mean())


def batch_for(name: str, samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    if name == "vit":
        pixels = torch.randn(samples, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": labels}
    if name == "stack":
        return {"x": torch.randn(samples, 16, generator=generator), "labels": labels}
    if name == "sequential":
        return {"input": torch.randn(samples, 16, generator=generator)}
    return text(samples)


MAKERS: dict[str, Any] = {
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
    "vit": vit,
    "stack": Stack,
    "sequential": sequential,
}

# Names of neighbouring blocks that make one chain.
CHAIN: dict[str, tuple[str, ...]] = {
    "gpt2": tuple(f"transformer.h.{i}" for i in range(BLOCKS)),
    "llama": tuple(f"model.layers.{i}" for i in range(BLOCKS)),
    "t5": tuple(f"decoder.block.{i}" for i in range(BLOCKS)),
    "vit": tuple(f"vit.layers.{i}" for i in range(BLOCKS)),
    "stack": tuple(f"layers.{i}" for i in range(BLOCKS)),
    "sequential": tuple(str(i) for i in range(BLOCKS)),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[name]().train()
