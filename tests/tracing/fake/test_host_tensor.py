"""Tensors that ``Module.to`` leaves in host memory, and that a forward moves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetfit

WIDTH = 1024
BYTES = 4 * WIDTH**2  # of a table


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self.first(x))).sum()

    def use(self, x: Tensor) -> Tensor:
        return x


class Buffer(Network):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH, WIDTH), persistent=False)

    def use(self, x: Tensor) -> Tensor:
        return x * self.table


class Kept(Network):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(WIDTH, WIDTH)

    def use(self, x: Tensor) -> Tensor:
        self.table = self.table.to(x.device)
        return x * self.table


class KeptWhereItDiffers(Kept):
    def use(self, x: Tensor) -> Tensor:
        if self.table.device != x.device:
            self.table = self.table.to(x.device)
        return x * self.table


class KeptInADictionary(Network):
    def __init__(self) -> None:
        super().__init__()
        self.tables = {"ones": [torch.ones(WIDTH, WIDTH)]}

    def use(self, x: Tensor) -> Tensor:
        self.tables["ones"][0] = self.tables["ones"][0].to(x)
        return x * self.tables["ones"][0]


class MovedWithTheModel(Kept):
    def _apply(self, fn: Any, recurse: Any = True) -> Any:
        super()._apply(fn, recurse)
        self.table = fn(self.table)
        return self

    def use(self, x: Tensor) -> Tensor:
        return x * self.table


class Sliced(Network):
    """Moved for each use, which keeps it for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.ones(4, WIDTH, WIDTH)

    def use(self, x: Tensor) -> Tensor:
        return x * self.tables[2].to(x.device)


class Read(Network):
    """Values of one decide what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = torch.tensor([WIDTH // 4, 4])

    def use(self, x: Tensor) -> Tensor:
        rows, columns = self.sizes.tolist()
        return x.view(-1, int(self.sizes[0]), columns).flatten(1) * rows


def estimated(model: nn.Module) -> budgetfit.Estimate:
    recipe = budgetfit.Recipe(batch_size=WIDTH, precision="fp32", optimizer="sgd")
    return budgetfit.estimate(
        model, recipe, gpu="rtx-4090", batch=torch.randn(WIDTH, WIDTH)
    )


def forward_bytes(found: budgetfit.Estimate) -> int:
    points = found.timeline.points
    return max(each.allocated_bytes for each in points if each.phase == "forward")


@pytest.mark.parametrize(
    "kind", [Kept, KeptWhereItDiffers, KeptInADictionary, MovedWithTheModel]
)
def test_one_that_is_moved_for_good_is_a_buffer(kind: type[nn.Module]) -> None:
    assert estimated(kind()).allocated_bytes == estimated(Buffer()).allocated_bytes


def test_one_that_is_moved_for_each_use_is_an_activation() -> None:
    each_time, always = estimated(Sliced()), estimated(Buffer())
    assert forward_bytes(each_time) == forward_bytes(always)
    assert each_time.allocated_bytes == always.allocated_bytes - BYTES  # later


def test_values_are_known() -> None:
    assert estimated(Read()).allocated_bytes >= estimated(Network()).allocated_bytes


def test_a_model_keeps_its_own_tensors() -> None:
    model = Kept()
    estimated(model)
    assert type(model.table) is Tensor
