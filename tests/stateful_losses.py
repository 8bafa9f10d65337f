"""Losses of a training that keep something from one step to the next."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Loss = Callable[[Any, Any], torch.Tensor]


class RunningMean(nn.Module):
    """As DINO's center."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.center: torch.Tensor

    def forward(self, outputs: torch.Tensor, _: object) -> torch.Tensor:
        value = (outputs - self.center).square().mean()
        self.center.mul_(0.9).add_(0.1 * outputs.detach().mean(0))
        return value


class Teacher:
    """A second model that follows the first, and a count, in a plain object."""

    def __init__(self) -> None:
        self.teacher = nn.Linear(4, 4)
        self.steps = 0

    def __call__(self, outputs: torch.Tensor, _: object) -> torch.Tensor:
        self.steps += 1
        value = (self.teacher(outputs.detach()) - outputs).square().mean()
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)
        return value / self.steps


def closure() -> Loss:
    """A warm-up that counts in what it closes over."""
    steps = 0

    def warm_up(outputs: torch.Tensor, _: object) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return outputs.square().mean() * steps

    return warm_up


def queue() -> Loss:
    """A queue of earlier outputs in a tensor, as MoCo's."""
    earlier = torch.zeros(4)

    def contrast(outputs: torch.Tensor, _: object) -> torch.Tensor:
        value = (outputs - earlier).square().mean()
        earlier.copy_(outputs.detach()[0])
        return value

    return contrast


def noise() -> Loss:
    """Noise of a generator of its own."""
    generator = torch.Generator().manual_seed(1)

    def noisy(outputs: torch.Tensor, _: object) -> torch.Tensor:
        drawn = torch.rand(outputs.shape[1:], generator=generator)
        return (outputs - drawn).square().mean()

    return noisy


_SEEN: list[int] = []


def in_global() -> Loss:
    """A count in a list of the module."""
    _SEEN.clear()

    def counting(outputs: torch.Tensor, _: object) -> torch.Tensor:
        _SEEN.append(1)
        return outputs.square().mean() * len(_SEEN)

    return counting


LOSSES: dict[str, Callable[[], Loss]] = {
    "module": RunningMean,
    "object": Teacher,
    "closure": closure,
    "queue": queue,
    "noise": noise,
    "global": in_global,
}
