"""Code that does something else on CUDA is traced as on the CPU, which is said."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import budgetfit

Ask = Callable[[torch.Tensor], object]


class Asks(nn.Module):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ask(x)
        return self.linear(x).sum()


def in_a_test(x: torch.Tensor) -> object:
    return 1 if x.device.type == "cuda" else 2


def of_several(x: torch.Tensor) -> object:
    return x.device.type in {"cuda", "xpu"}


def in_text(x: torch.Tensor) -> object:
    return "cuda" in str(x.device) or str(x.device).startswith("cuda")


def with_a_device(x: torch.Tensor) -> object:
    return x.device == torch.device("cuda")


def on_the_device(x: torch.Tensor) -> object:
    return torch.ones(4, device=x.device) if x.dim() == 2 else x.to(x.device)


def of_another(x: torch.Tensor) -> object:
    return x.device.type == "mps"


def notes(ask: Ask) -> list[str]:
    recipe = budgetfit.Recipe(batch_size=2)
    batch = torch.zeros(2, 4)
    found = budgetfit.estimate(
        Asks(ask), recipe, gpu="t4", batch=batch, loss=lambda y, _: y
    )
    return [note for note in found.notes if "asks whether a tensor is on CUDA" in note]


@pytest.mark.parametrize(
    "ask", [lambda x: x.is_cuda, in_a_test, of_several, in_text, with_a_device]
)
def test_a_function_that_asks_for_cuda_is_named(ask: Ask) -> None:
    (note,) = notes(ask)
    assert note.startswith(f"{__name__}.{ask.__qualname__} ")


@pytest.mark.parametrize("ask", [on_the_device, of_another])
def test_one_that_uses_the_device_alone_is_not(ask: Ask) -> None:
    assert notes(ask) == []
