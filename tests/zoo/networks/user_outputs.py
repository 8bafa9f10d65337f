"""What users return, and what they call their models with."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


class Block(nn.Module):
    """A residual block of two Linear layers: what most of these are made of."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.outer, self.dropout = nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(F.gelu(self.inner(self.norm(x)))))


class Trunk(nn.Module):
    """Blocks one after the other; a subclass may define another ``Block``."""

    Block: type[nn.Module] = Block

    def __init__(self, blocks: int = 3, **settings: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(**settings) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class DictOutput(Trunk):
    def forward(self, x: Tensor) -> dict[str, Any]:
        x = super().forward(x)
        return {"hidden": x, "nested": {"mean": x.mean(-1)}, "name": "dict", "n": 3}


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None
    hidden: list[Tensor] = field(default_factory=list)
    step: int = 0


class DataclassOutput(Trunk):
    """An own loss in a dataclass, as transformers' outputs have it."""

    def forward(self, x: Tensor) -> Answer:
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return Answer(x, loss=x.pow(2).mean(), hidden=hidden)


@dataclass(frozen=True, slots=True)
class FrozenAnswer:
    mean: Tensor
    spread: Tensor


class FrozenDataclassOutput(Trunk):
    def forward(self, x: Tensor) -> FrozenAnswer:
        x = super().forward(x)
        return FrozenAnswer(x.mean(-1), x.var(-1))


class Pair(NamedTuple):
    scores: Tensor
    hidden: Tensor


class NamedTupleOutput(Trunk):
    def forward(self, x: Tensor) -> Pair:
        x = super().forward(x)
        return Pair(x.sum(-1), x)


class TupleWithIntegers(Trunk):
    """A float output beside indices and None."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        x = super().forward(x)
        return x, x.argmax(-1), None


class PlainObject:
    """Neither mapping nor tuple nor dataclass."""

    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


class PlainObjectOutput(Trunk):
    def forward(self, x: Tensor) -> PlainObject:
        x = super().forward(x)
        return PlainObject(x.square().mean(), x)


class DistributionOutput(Trunk):
    """A torch.distributions object, and a loss of the user's that asks it."""

    def forward(self, x: Tensor) -> torch.distributions.Normal:
        x = super().forward(x)
        return torch.distributions.Normal(x, F.softplus(x) + 0.1, validate_args=False)


def negative_log_likelihood(
    outputs: torch.distributions.Normal, batch: dict[str, Tensor]
) -> Tensor:
    return -outputs.log_prob(batch["y"]).mean()


class LossList(Trunk):
    """Deep supervision: a loss for every block."""

    def forward(self, x: Tensor) -> list[Tensor]:
        losses = []
        for block in self.blocks:
            x = block(x)
            losses.append(x.square().mean())
        return losses


class LossDict(Trunk):
    """torchvision's detectors in training: a dictionary of losses."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = super().forward(x)
        return {"loss_box": x.abs().mean(), "loss_class": x.square().mean()}


class ScalarLoss(Trunk):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x), y)


class SeveralLosses(Trunk):
    """Heads whose losses the user's function weighs; outputs as a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict(
            {"kind": nn.Linear(WIDTH, 3), "value": nn.Linear(WIDTH, 1)}
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = super().forward(x)
        return {name: head(x) for name, head in self.heads.items()}


def weighed_losses(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    kind = F.cross_entropy(outputs["kind"], batch["kind"])
    return kind + 0.5 * F.l1_loss(outputs["value"].squeeze(-1), batch["value"])


class StatefulLoss(nn.Module):
    """A criterion with weights of its own (class weights) beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(torch.ones(WIDTH), label_smoothing=0.1)

    def forward(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.criterion(outputs, batch[1])


class KeywordOnly(Trunk):
    """Arguments that only have names, one of them no tensor."""

    def forward(self, *, x: Tensor, scale: float = 1.0, mode: str = "sum") -> Tensor:
        x = super().forward(x) * scale
        return x.sum(-1) if mode == "sum" else x


class AnyArguments(Trunk):
    def forward(self, *args: Tensor) -> Tensor:
        return super().forward(torch.stack(args).sum(0))


class AnyKeywords(Trunk):
    def forward(self, **inputs: Tensor) -> Tensor:
        return super().forward(inputs["left"] + inputs["right"])


class BatchDictionary(Trunk):
    """Lightning's habit: the batch itself is the one argument."""

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        x = super().forward(batch["x"])
        if batch["flag"] and batch["mode"] == "train":
            x = x * batch["repeat"]
        return {"loss": F.mse_loss(x, batch["y"])}


class NestedBatch(Trunk):
    """Tuples in lists in dictionaries."""

    def forward(self, views: list[dict[str, Tensor]], meta: tuple[Tensor, int]) -> Any:
        x = torch.stack([view["image"] for view in views]).mean(0)
        return super().forward(x) * meta[0][:, None] * meta[1]


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str = "sample"


class DataclassBatch(Trunk):
    def forward(self, sample: Sample) -> Tensor:
        return F.mse_loss(super().forward(sample.x), sample.y)


class GraphBatch(Trunk):
    """Nodes and edges: two sizes, neither of them a number of samples."""

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = super().forward(nodes)
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
