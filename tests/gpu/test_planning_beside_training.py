"""In a training loop on a CUDA device a plan is the CPU model's, and takes no memory.

It also runs on the null driver, which needs no card (and pytest beside its torch):

    python -m tests.accuracy.nulldriver.run --gpu rtx-4090 -- \\
        python -m pytest tests/gpu/test_planning_beside_training.py
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import budgetfit
from budgetfit.api.compare import compare
from tests.zoo.state import assert_same, model_state, process_state

Loss = Callable[[Any, Any], torch.Tensor]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"
    ),
]
CARD = "rtx-4090"
UNCHANGED = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
)


class Chain(nn.Module):
    """Equal blocks; the device is for those below that name it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, labels: object = None) -> torch.Tensor:
        del labels
        for layer in self.layers:
            x = torch.relu(layer(x))
        result: torch.Tensor = self.head(x)
        return result


class NamesDevice(Chain):
    def forward(self, x: torch.Tensor, labels: object = None) -> torch.Tensor:
        ramp = torch.arange(64, device=self.device, dtype=torch.float32)
        return super().forward(x.to(self.device) + ramp, labels)


class HoldsTensor(Chain):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.scales = [torch.ones(64, device=device)]

    def forward(self, x: torch.Tensor, labels: object = None) -> torch.Tensor:
        return super().forward(x * self.scales[0], labels)


class AsksBuffer(Chain):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, labels: object = None) -> torch.Tensor:
        if int(self.seen) == 0:
            x = torch.cat([x[:, :32], x[:, :32]], dim=1)
        return super().forward(x, labels)


def closure(device: str) -> Loss:
    weight = torch.ones(8, device=device)
    return lambda outputs, batch: functional.cross_entropy(
        outputs, batch["labels"], weight=weight
    )


class LossModule(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(8, device=device))

    def forward(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.loss(outputs, batch["labels"])
        return loss


def batch_on(device: str) -> dict[str, torch.Tensor]:
    return {
        "x": torch.zeros(4, 64, device=device),
        "labels": torch.zeros(4, dtype=torch.long, device=device),
    }


def answers(model: nn.Module, loss: Loss, batch: dict[str, torch.Tensor]) -> Any:
    """Return all that is asked about one model."""
    plan = budgetfit.plan(model, gpu=CARD, batch=batch, loss=loss, batch_size=8)
    given = budgetfit.estimate(model, gpu=CARD, batch=batch, loss=loss)
    rows, _ = compare(model, [CARD], batch=batch, loss=loss, batch_size=8)
    return plan.recipe, plan.estimate, plan.warnings, plan.alternatives, given, rows


@pytest.fixture
def _default_device() -> Iterator[None]:
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("_default_device")
@pytest.mark.parametrize("loss", [closure, LossModule])
@pytest.mark.parametrize("kind", [Chain, NamesDevice, HoldsTensor, AsksBuffer])
def test_a_plan_beside_training_is_the_cpus_and_takes_nothing(
    kind: Callable[[str], nn.Module], loss: Callable[[str], Loss]
) -> None:
    expected = answers(kind("cpu"), loss("cpu"), batch_on("cpu"))
    model, criterion, batch = kind("cuda").to("cuda"), loss("cuda"), batch_on("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    criterion(model(**batch), batch).backward()
    optimizer.step()
    half_done = criterion(model(**batch), batch)
    torch.set_default_device("cuda")
    gc.collect()
    before, random = torch.cuda.memory_stats(), torch.cuda.get_rng_state()
    state = process_state() | model_state(model)

    assert answers(model, criterion, batch) == expected
    gc.collect()
    after = torch.cuda.memory_stats()
    assert {key: after[key] for key in UNCHANGED} == {
        key: before[key] for key in UNCHANGED
    }
    assert torch.equal(random, torch.cuda.get_rng_state())
    assert_same(state, process_state() | model_state(model))
    half_done.backward()
    optimizer.step()
