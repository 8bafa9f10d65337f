"""What a program puts on CUDA by name is where its weights are; no card is needed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import budgetfit
from budgetfit.tracing.isolation.cuda_device_names import CudaDevicesOnCpu
from tests.models import squares


def moved(x: torch.Tensor, device: str) -> torch.Tensor:
    return x.to(device) + x.to(torch.device(device), torch.float32)


def called(x: torch.Tensor, device: str) -> torch.Tensor:
    return x * torch.ones(64).cuda() if device == "cuda" else x * torch.ones(64)


def made(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.cat([x, torch.zeros(1, 64, device=device)])[:-1]


def filled(x: torch.Tensor, device: str) -> torch.Tensor:
    with torch.device(device):
        return x + torch.arange(64.0)


def cast(x: torch.Tensor, device: str) -> torch.Tensor:
    return x.to(device=device, dtype=torch.float32)


class Names(nn.Module):
    """Says where it computes."""

    def __init__(self, change: Callable[[torch.Tensor, str], Any], device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.change, self.device = change, device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(self.change(x, self.device))
        return x


class WithGradient(torch.autograd.Function):
    """Twice its input; the gradient is made on a device that has a name."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: str) -> torch.Tensor:
        ctx.device = device
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * torch.full((64,), 2.0, device=ctx.device), None


def derived(x: torch.Tensor, device: str) -> torch.Tensor:
    made: torch.Tensor = WithGradient.apply(x, device)
    return made


def estimate(model: nn.Module, loss: Any = squares) -> budgetfit.Estimate:
    return budgetfit.estimate(model, gpu="t4", batch=torch.zeros(2, 64), loss=loss)


@pytest.mark.parametrize("change", [moved, called, made, filled, cast, derived])
def test_a_forward_that_names_cuda_takes_what_the_same_one_does(
    change: Callable[[torch.Tensor, str], Any],
) -> None:
    assert estimate(Names(change, "cuda")) == estimate(Names(change, "cpu"))


def test_a_loss_may_name_cuda() -> None:
    def loss(device: str) -> Any:
        def criterion(outputs: torch.Tensor, _: object) -> torch.Tensor:
            target = torch.zeros(64, device=device)
            return functional.mse_loss(outputs.to(device), target.expand_as(outputs))

        return criterion

    model = Names(cast, "cpu")
    assert estimate(model, loss("cuda")) == estimate(model, loss("cpu"))


def test_only_devices_are_changed() -> None:
    with CudaDevicesOnCpu():
        one = torch.ones(2, 3, device="cuda")
        two = torch.einsum("cu,ud->cd", one, torch.ones(3, 4, device="cuda:1"))

        assert two.device.type == "cpu"
        assert one.cuda() is one
        assert one.to("cuda") is one
        assert one.to("meta").is_meta
        assert one.to(torch.float64, non_blocking=True).dtype == torch.float64
        assert torch.equal(two, torch.full((2, 4), 3.0))


def test_a_real_error_about_cuda_is_told() -> None:
    def fails(_: torch.Tensor, __: str) -> torch.Tensor:
        msg = "this kernel needs CUDA 99"
        raise RuntimeError(msg)

    with pytest.raises(budgetfit.TraceError, match="this kernel needs CUDA 99"):
        estimate(Names(fails, "cuda"))
