"""Blocks whose forward is another one the second time, if nobody sees to it.

Each is a way to write a block that trains well as it is. Recomputed without care, it
trains with other gradients, or not at all.
"""

# ruff: noqa: S311, NPY002 - the generators are what is tried

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

WIDTH = 8

log: list[float] = []  # a global that forwards append to
calls = {"global": 0, "hook": 0}


class Block(nn.Module):
    """A residual MLP; children change what happens in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        """Make what the block needs besides."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.between(self.inner(x))))

    def between(self, x: Tensor) -> Tensor:
        return x


class TorchDropout(Block):
    def between(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3)


class PythonScale(Block):
    def between(self, x: Tensor) -> Tensor:
        return x * (0.5 + random.random())


class PythonGauss(Block):
    """Draws one of a pair of normal numbers; the other one waits in the generator."""

    def between(self, x: Tensor) -> Tensor:
        return x * (1 + random.gauss(0, 0.3))


class NumpyScale(Block):
    def between(self, x: Tensor) -> Tensor:
        return x * (0.5 + np.random.rand())


class NumpyGauss(Block):
    def between(self, x: Tensor) -> Tensor:
        return x * (1 + 0.3 * np.random.randn())


class OwnPythonGenerator(Block):
    def prepare(self) -> None:
        self.chance = random.Random(3)

    def between(self, x: Tensor) -> Tensor:
        return x * (0.5 + self.chance.random())


class OwnNumpyGenerator(Block):
    def prepare(self) -> None:
        self.chance = np.random.default_rng(3)

    def between(self, x: Tensor) -> Tensor:
        return x * (0.5 + self.chance.random())


class OwnTorchGenerator(Block):
    def prepare(self) -> None:
        self.chance = torch.Generator().manual_seed(3)

    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.chance)


hidden_generator = torch.Generator().manual_seed(3)


class HiddenGenerator(Block):
    """Draws from a generator that no module has."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=hidden_generator)


class Counter(Block):
    def prepare(self) -> None:
        self.count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / (1 + 0.1 * self.count)


class SlowCounter(Block):
    """Changes what it does long after the first step."""

    def prepare(self) -> None:
        self.count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / (1 + self.count // 7)


class CounterBuffer(Block):
    def prepare(self) -> None:
        self.register_buffer("count", torch.zeros(()))

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / (1 + 0.1 * self.count)


class BatchNorm(Block):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


class RunningMean(Block):
    """State in a plain attribute, moved on in place."""

    def prepare(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return (x - self.mean) * (1 + self.mean)


class RememberedState(Block):
    """State in a plain attribute, put anew: a recurrence over batches."""

    def prepare(self) -> None:
        self.state: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        before = 0.0 if self.state is None else self.state
        y = torch.sin(x + before)
        self.state = y.detach()
        return y


class SpectralNorm(Block):
    def prepare(self) -> None:
        self.inner = spectral_norm(self.inner)


class OldSpectralNorm(Block):
    """The older one: a hook before the forward puts the weight in an attribute."""

    def prepare(self) -> None:
        self.inner = nn.utils.spectral_norm(self.inner)


class Autocast(Block):
    def between(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.outer(x)
        with torch.autocast("cpu", enabled=False):
            return self.outer(y.float()) * y.float()


class CountingHook(Block):
    def prepare(self) -> None:
        self.inner.register_forward_hook(_count_and_scale)


def _count_and_scale(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    calls["hook"] += 1
    return output / (1 + 0.1 * calls["hook"])


class DrawingHook(Block):
    def prepare(self) -> None:
        self.inner.register_forward_hook(_scale_by_chance)


def _scale_by_chance(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return output * (0.5 + random.random())


class Flag(Block):
    """A branch on a flag that each forward turns; its sides save as much."""

    def prepare(self) -> None:
        self.even = True

    def between(self, x: Tensor) -> Tensor:
        self.even = not self.even
        return x * x if self.even else x * self.inner(x)


class GlobalCount(Block):
    def between(self, x: Tensor) -> Tensor:
        calls["global"] += 1
        return x / (1 + calls["global"] % 3)


class GrowingList(Block):
    def between(self, x: Tensor) -> Tensor:
        log.append(float(x.detach().mean()))
        return x * (1 + 0.1 * len(log))


class FilledCache(Block):
    """Computes a mask once for each batch; the training loop empties the cache."""

    cache: dict[str, Tensor]

    def prepare(self) -> None:
        self.cache = {}

    def between(self, x: Tensor) -> Tensor:
        if "mask" not in self.cache:
            self.cache["mask"] = torch.sigmoid(self.outer(x))
        return x * self.cache["mask"]


class RandomDepth(Block):
    """Leaves its work out now and then; drawn from torch, so shapes depend on it."""

    def between(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape[0]) < 0.5
        y = torch.zeros_like(x)
        y[keep] = torch.tanh(self.outer(x[keep]))
        return y


class RandomReLU(Block):
    def prepare(self) -> None:
        self.relu = nn.RReLU()

    def between(self, x: Tensor) -> Tensor:
        return self.relu(x)


class LastIsRandomReLU(RandomReLU):
    """Nothing is saved after the tensor that is still to be filled."""

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.inner(x))


# The twelve kinds; each with the ways to write it.
KINDS: dict[str, tuple[Callable[[], Block], ...]] = {
    "torch dropout": (TorchDropout, RandomReLU, LastIsRandomReLU),
    "Python's random": (PythonScale, PythonGauss),
    "numpy's random": (NumpyScale, NumpyGauss),
    "private generator": (
        OwnPythonGenerator,
        OwnNumpyGenerator,
        OwnTorchGenerator,
        HiddenGenerator,
    ),
    "counter attribute": (Counter, SlowCounter),
    "counter in a buffer": (CounterBuffer,),
    "in-place state": (BatchNorm, RunningMean, RememberedState),
    "spectral norm": (SpectralNorm, OldSpectralNorm),
    "autocast in the block": (Autocast,),
    "hook": (CountingHook, DrawingHook),
    "branch on a flag or a number": (Flag, RandomDepth),
    "global list or cache": (GlobalCount, GrowingList, FilledCache),
}


class Tower(nn.Module):
    """Four blocks and a head."""

    def __init__(self, kind: Callable[[], Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def start(kind: Callable[[], Block]) -> Tower:
    """Return a model, always the same, and all state outside of it as it was."""
    seed(0)
    hidden_generator.manual_seed(3)
    log.clear()
    calls.update({"global": 0, "hook": 0})
    return Tower(kind)


def seed(number: int) -> None:
    """Seed all global generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def between_steps(model: Tower) -> None:
    """Do what a training loop does between two batches."""
    for block in model.blocks:
        if isinstance(block, FilledCache):
            block.cache.clear()
