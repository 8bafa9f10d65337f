"""Functions that remember hold no fakes after a trace."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import budgetfit


@functools.lru_cache(maxsize=4)
def positions(length: int) -> torch.Tensor:
    return torch.arange(length).float()


@functools.cache
def untouched(length: int) -> torch.Tensor:
    return torch.zeros(length)


def remembered_inside(function: Callable[[], torch.Tensor]) -> object:
    memory = functools.cache(function)

    @functools.wraps(function)
    def call(*_: object) -> torch.Tensor:
        return memory()

    return call


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = functools.cache(lambda: torch.ones(4))  # a copy shares it

    @staticmethod
    @functools.cache
    def scale() -> torch.Tensor:
        return torch.ones(())

    @remembered_inside
    def offset() -> torch.Tensor:
        return torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + positions(x.shape[1]) * self.scale()
        return self.linear(x + self.shift() + self.offset())


@pytest.mark.parametrize("run", [budgetfit.estimate, budgetfit.plan])
def test_a_real_forward_after_planning_finds_no_fakes(run: object) -> None:
    kept = untouched(3)
    model, batch = Positioned(), torch.zeros(2, 4)
    assert callable(run)
    run(model, gpu="t4", batch=batch)
    assert not isinstance(model(batch), FakeTensor)
    assert type(positions(4)) is type(Positioned.scale()) is torch.Tensor
    assert type(model.offset()) is torch.Tensor
    assert untouched(3) is kept
    positions.cache_clear()
    Positioned.scale.cache_clear()
