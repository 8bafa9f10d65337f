"""A recomputed block finds its buffers as its forward did, and moves them on once."""

import copy

import pytest
import torch
from torch import Tensor, nn

from budgetfit.applying.checkpointing.mutated_buffers import (
    MAX_ELEMENTS,
    MutatedBuffers,
)
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from tests.models import mean

NAMES = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


class Centred(nn.Module):
    """Subtracts an average that its own forward has moved on, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(6, 6), in_place
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        mean = y.detach().mean(0)
        if self.in_place:
            self.average.lerp_(mean, 0.5)
        else:
            self.average = torch.lerp(self.average, mean, 0.5)
        return torch.tanh((y - self.average) * (1 + self.average))


def spectral() -> nn.Module:
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    return nn.Sequential(linear, nn.Tanh())


KINDS = {
    "in place": lambda: Centred(in_place=True),
    "replaced": lambda: Centred(in_place=False),
    "spectral norm": spectral,
    "instance norm": lambda: nn.Sequential(
        nn.Linear(6, 6),
        nn.Unflatten(1, (2, 3)),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.Flatten(),
        nn.Tanh(),
    ),
    "norm of several cards": lambda: nn.Sequential(
        nn.Linear(6, 6), nn.SyncBatchNorm(6)
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()),
}
SEGMENTS = {
    "each": tuple(Segment((name,)) for name in NAMES),
    "pairs": (Segment(NAMES[:2]), Segment(NAMES[2:])),
    "nested": (Segment(NAMES, nested=True),),
}


class Tower(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KINDS[kind]() for _ in NAMES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(model: nn.Module, segments: tuple[Segment, ...]) -> nn.Module:
    recipe = Recipe(batch_size=4, precision="fp32", optimizer="sgd", segments=segments)
    with Run(model, recipe, loss=mean) as run:
        for seed in range(3):
            torch.manual_seed(seed)
            run.step(torch.randn(4, 6))
    return model


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_buffers_are_those_of_plain_training(
    kind: str, segments: str
) -> None:
    model = Tower(kind)
    plain = trained(copy.deepcopy(model), ()).state_dict()
    planned = trained(model, SEGMENTS[segments]).state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(planned[name], value, rtol=1e-6, atol=1e-7)


def test_a_buffer_that_nobody_writes_to_is_copied_once_and_when_all_are() -> None:
    block = nn.Linear(2, 2)
    block.register_buffer("table", torch.zeros(2))
    buffers = MutatedBuffers(block)
    assert buffers.find_mutated(buffers.snapshot()) == []
    assert buffers.snapshot() == []
    assert [each.name for each in buffers.snapshot(every=True)] == ["table"]


def test_a_buffer_that_was_written_to_once_is_always_held() -> None:
    block = Centred(in_place=True)
    buffers = MutatedBuffers(block)
    first = buffers.snapshot()
    block.average += 1
    assert [each.name for each in buffers.find_mutated(first)] == ["average"]
    for _ in range(2):  # forwards that leave it alone
        held = buffers.snapshot()
        assert [each.name for each in held] == ["average"]
        assert buffers.find_mutated(held) == []


def test_large_tables_are_never_copied() -> None:
    block = nn.Linear(2, 2)
    block.register_buffer("mask", torch.zeros(MAX_ELEMENTS + 1, dtype=torch.bool))
    assert MutatedBuffers(block).snapshot() == []
