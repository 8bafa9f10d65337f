"""Gradients of products, and what is saved on the host, as CUDA computes them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe
from budgetfit.tracing.cuda.dispatch.product_gradients import cumprod, prod, prod_of_dim
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.recording.step_tracer import trace_step
from tests.models import without_loss

TARGET = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13), cudnn=False)
WIDTH, LENGTH, SAMPLES = 64, 128, 4
ACTIVATION_BYTES = SAMPLES * LENGTH * WIDTH * 4

Function = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(
    ("mine", "torchs"),
    [
        (lambda x: cumprod(x, 1), lambda x: x.cumprod(1)),
        (lambda x: cumprod(x, -2), lambda x: x.cumprod(-2)),
        (prod, torch.prod),
        (lambda x: prod_of_dim(x, 1), lambda x: x.prod(1)),
        (lambda x: prod_of_dim(x, 0, True), lambda x: x.prod(0, keepdim=True)),
    ],
    ids=["running", "running backwards", "all", "of a dimension", "kept"],
)
def test_gradients_are_torchs(mine: Function, torchs: Function) -> None:
    torch.manual_seed(0)
    x = torch.rand(3, 4, 2).add(0.5).requires_grad_()
    [own] = torch.autograd.grad(mine(x).square().sum(), x)
    [theirs] = torch.autograd.grad(torchs(x).square().sum(), x)
    assert torch.allclose(own, theirs)


class Then(nn.Module):
    """A linear layer, and a function of what it returns."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the function's values."""
        return self.function(self.linear(x)).mean()


def peaks(function: Function) -> dict[str, float]:
    """Return the peak of each phase in activations."""
    recipe = Recipe(batch_size=SAMPLES, optimizer="sgd")
    raw = trace_step(
        Then(function),
        lambda copied, on_phase: Run(
            copied, recipe, on_phase=on_phase, on_missing_loss=without_loss
        ),
        torch.empty(SAMPLES, LENGTH, WIDTH),
        batch_size=SAMPLES,
        blocks=(),
        target=TARGET,
    )
    live, result = 0, {}
    for phase in raw.phases:
        most = live
        for event in raw.log.events[phase.start : phase.end]:
            live += raw.log.sizes[abs(event) - 1] * (1 if event > 0 else -1)
            most = max(most, live)
        result[phase.name] = most / ACTIVATION_BYTES
    return result


def test_the_gradient_of_a_running_product_needs_no_path_without_division() -> None:
    # batch, input, output; gradient, product, which are zero (1/4), and three turns
    assert 7.2 < peaks(lambda x: x.cumprod(1))["backward"] < 8.5


def test_the_gradient_of_a_product_in_another_dtype_casts_its_input() -> None:
    narrow = peaks(lambda x: x.half().prod(1, dtype=torch.float32))["backward"]
    # batch, input in fp16 (1/2) and fp32, zeros (1/4), the quotient and the gradient
    assert 4.7 < narrow < 5.1


def test_tensors_that_are_saved_on_the_cpu_take_no_device_memory() -> None:
    def saving(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return x.exp().exp().exp().exp()

    def keeping(x: Tensor) -> Tensor:
        return x.exp().exp().exp().exp()

    assert peaks(keeping)["forward"] - peaks(saving)["forward"] >= 2


def test_sorting_writes_its_gradient_into_zeros_in_place() -> None:
    sort = peaks(lambda x: x.sort(1)[0])["backward"]
    # batch, int64 indices, the gradient and the zeros that it is written into
    assert 5 <= sort < 5.5
