"""How users put modules together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from tests.zoo.networks.user_outputs import WIDTH, Block, Trunk


class NestedLists(nn.Module):
    """Stages of branches of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            outputs = []
            for branch in stage:
                y = x
                for block in branch:
                    y = block(y)
                outputs.append(y)
            x = torch.stack(outputs).mean(0)
        return x


class SharedBlock(nn.Module):
    """ALBERT's way: one block runs several times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(WIDTH, WIDTH), Block(dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = self.block(x)
        return x


class SharedAmongOthers(Trunk):
    """The same module under two names in a list."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.blocks = nn.ModuleList([shared, Block(), shared, Block()])


class Siamese(Trunk):
    """One trunk sees both inputs."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = super().forward(left), super().forward(right)
        return F.cosine_similarity(left, right).neg()


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, WIDTH)
        self.positions = nn.Embedding(24, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        places = torch.arange(idx.shape[1], device=idx.device)
        x = self.tokens(idx) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class FrozenTrunk(nn.Module):
    """A frozen part in evaluation mode, run without gradients, and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(Block(dropout=0.5), Block(), nn.BatchNorm1d(WIDTH))
        self.trunk.requires_grad_(False).eval()
        self.head = nn.Sequential(Block(), Block())

    def train(self, mode: bool = True) -> "FrozenTrunk":
        super().train(mode)
        self.trunk.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.trunk(x)
        return self.head(x)


class HalfFrozen(Trunk):
    """The first blocks are frozen but run with gradients."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[:2].requires_grad_(False)


class Parameters(nn.Module):
    """ParameterList and ParameterDict, and no layer at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))
        self.biases = nn.ParameterDict(
            {f"b{k}": nn.Parameter(torch.zeros(WIDTH)) for k in range(3)}
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases.values(), strict=True):
            x = torch.tanh(x @ weight + bias)
        return x


class ModuleDictOfTasks(nn.Module):
    """Heads by name; the batch names the task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Block()
        self.heads = nn.ModuleDict({"a": Block(), "b": Block()})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](self.trunk(x))


class HiddenModules(nn.Module):
    """Modules in a plain list too: their parameters are not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.hidden = [Block()]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.first(x))


class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _three(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(layer(), nn.Tanh()) for _ in range(3)))


def old_weight_norm() -> nn.Module:
    """torch.nn.utils.weight_norm: a pre-hook that sets an attribute."""
    return _three(lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)))


def spectral_norm() -> nn.Module:
    """Power iteration writes to buffers in every forward."""
    return _three(lambda: parametrizations.spectral_norm(nn.Conv2d(3, 3, 3, padding=1)))


def old_spectral_norm() -> nn.Module:
    return _three(lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    """A parametrization of the user's own, and an orthogonal one."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    nn.utils.parametrize.register_parametrization(first, "weight", Symmetric())
    parametrizations.orthogonal(second, orthogonal_map="cayley")
    return nn.Sequential(first, nn.ReLU(), second)


def pruned() -> nn.Module:
    """torch.nn.utils.prune: a mask as a buffer and a pre-hook."""
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    return model


class Gan(nn.Module):
    """Generator and discriminator; the loss is that of both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Block(), Block())
        self.discriminator = nn.Sequential(Block(), nn.Linear(WIDTH, 1))

    def forward(self, real: Tensor) -> dict[str, Tensor]:
        fake = self.generator(torch.randn_like(real))
        judged_real = self.discriminator(real)
        judged_fake = self.discriminator(fake.detach())
        critic = F.softplus(-judged_real).mean() + F.softplus(judged_fake).mean()
        return {"loss": critic + F.softplus(-self.discriminator(fake)).mean()}


class MomentumEncoder(nn.Module):
    """MoCo and BYOL: a second copy follows by an average, written in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = Trunk(), Trunk()
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
        for target, online in pairs:
            target.mul_(0.99).add_(online, alpha=0.01)

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        with torch.no_grad():
            wanted = self.target(x)
        return 2 - 2 * F.cosine_similarity(self.online(x), wanted).mean()


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()
