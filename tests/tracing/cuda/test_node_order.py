"""Gradients of gradients: in CUDA's order, and so with what CUDA holds."""

import threading
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import budgetfit
from budgetfit.tracing.cuda import op_semantics
from budgetfit.tracing.cuda.node_order import cuda_node_order
from tests.accuracy.nulldriver.addresses import null_driver_addresses

RECIPE = budgetfit.Recipe(batch_size=1024, precision="as-is", optimizer="adamw_torch")


class Learner(nn.Module):
    """Three updates inside the forward, through which the loss is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (64, 256, 256, 1)
        layers = [nn.Linear(sizes[k], sizes[k + 1]) for k in range(3)]
        self.net = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        for _ in range(3):
            loss = self.loss(weights, x, y)
            slopes = torch.autograd.grad(
                loss, list(weights.values()), create_graph=True
            )
            pairs = zip(weights.items(), slopes, strict=True)
            weights = {name: old - 0.01 * slope for (name, old), slope in pairs}
        return self.loss(weights, x, y)

    def loss(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(functional_call(self.net, weights, (x,)), y)


class Critic(nn.Module):
    """A penalty on the input's gradient, before or after the rest of the loss."""

    def __init__(self, *, penalty_last: bool) -> None:
        super().__init__()
        self.penalty_last = penalty_last
        self.net = nn.Sequential(
            nn.Linear(64, 512),
            nn.LeakyReLU(0.2),
            nn.Linear(512, 512),
            nn.LeakyReLU(0.2),
            nn.Linear(512, 1),
        )

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        parts = [self.penalty, self.difference]
        if self.penalty_last:
            parts.reverse()
        first, second = (part(real, fake) for part in parts)
        return first + second

    def difference(self, real: Tensor, fake: Tensor) -> Tensor:
        return self.net(fake).mean() - self.net(real).mean()

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        score = self.net(mixed).sum()
        (slope,) = torch.autograd.grad(score, mixed, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()


X, Y = torch.zeros(1024, 64), torch.zeros(1024, 1)
# Bytes allocated and reserved on the null driver: a plain loop, torch 2.13.
RECORDED = {
    "learner": (43_309_056, 48_234_496),
    "penalty first": (54_167_552, 75_497_472),
    "penalty last": (54_159_360, 73_400_320),
}


def predicted(name: str) -> tuple[int, int]:
    if name == "learner":
        model, batch = Learner(), (X, Y)
    else:
        model, batch = Critic(penalty_last=name == "penalty last"), (X, X)
    with null_driver_addresses():
        found = budgetfit.estimate(
            model, RECIPE, gpu="rtx-4090", batch=batch, loop="plain"
        )
    return found.allocated_bytes, found.reserved_bytes


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="recorded with torch 2.13"
)
@pytest.mark.parametrize("name", RECORDED)
def test_gradients_of_gradients_hold_what_they_hold_on_cuda(name: str) -> None:
    assert predicted(name) == RECORDED[name]


def test_one_threads_count_would_be_wrong() -> None:
    with mock.patch.object(op_semantics, "cuda_node_order", threading.Lock):
        assert predicted("learner")[0] < RECORDED["learner"][0]
        assert predicted("penalty last")[0] > RECORDED["penalty last"][0]


def graph() -> tuple[Tensor, Tensor]:
    """Return a value and the gradient of its gradient's sum, not yet run."""
    x = torch.ones(2, requires_grad=True)
    value = x.sin().cos().sin().cos()
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return value, slope


def number(tensor: Tensor) -> int:
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def test_all_nodes_of_a_backward_pass_come_before_or_after_all_others() -> None:
    for others in (0, 100):
        with cuda_node_order():
            value, slope = graph()
            for _ in range(others):
                value = value * 2
            root = value.sum() + slope.sum()
            root.backward()
        assert (number(slope) > number(value)) == (others == 0)


def test_other_threads_and_the_time_after_a_trace_are_left_alone() -> None:
    numbers = []

    def elsewhere() -> None:
        value, slope = graph()
        (value.sum() + slope.sum()).backward()
        numbers.append(number(slope))

    with cuda_node_order():
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
    elsewhere()
    assert max(numbers) < 1 << 40
