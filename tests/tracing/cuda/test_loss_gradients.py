"""Gradients of the cross-entropy of logits: torch's values, computed in place."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from budgetfit.tracing.cuda.dispatch.loss_gradients import logits_loss
from tests.tracing.cuda.test_product_gradients import peaks

SHAPE = 3, 4
WEIGHTS = {
    "plain": (None, None),
    "weight": (2.0, None),
    "pos_weight": (None, 3.0),
    "both": (2.0, 3.0),
}


def double(value: float | None) -> Tensor | None:
    return None if value is None else torch.full(SHAPE[1:], value).double()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_gradients_are_torchs(weights: str, reduction: str) -> None:
    torch.manual_seed(0)
    weight, pos_weight = map(double, WEIGHTS[weights])
    x, target = (torch.rand(SHAPE).double().requires_grad_() for _ in range(2))
    number = ["none", "mean", "sum"].index(reduction)
    mine = logits_loss(x, target, weight, pos_weight, number)
    theirs = functional.binary_cross_entropy_with_logits(
        x, target, weight, reduction=reduction, pos_weight=pos_weight
    )
    for again in (False, True):
        own, expected = (
            torch.autograd.grad(
                loss.square().sum(), [x, target], create_graph=again, retain_graph=True
            )
            for loss in (mine, theirs)
        )
        assert all(map(torch.allclose, own, expected))
    seconds = [
        torch.autograd.grad(first[0].square().sum(), x)[0] for first in (own, expected)
    ]
    assert torch.allclose(*seconds)


def loss(x: Tensor, pos_weight: Tensor | None = None) -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        x, torch.ones_like(x), pos_weight=pos_weight
    )


def test_the_gradient_is_computed_in_place() -> None:
    # batch, logits, targets and the gradient
    assert 4 <= peaks(loss)["backward"] < 4.5


def test_with_weights_of_the_positive_ones_it_takes_three_tensors() -> None:
    def weighted(x: Tensor) -> Tensor:
        return loss(x, pos_weight=torch.ones(x.shape[-1]))

    # batch, logits, targets; weighted targets, the gradient and the sigmoid
    assert 6 <= peaks(weighted)["backward"] < 6.5


def test_products_and_losses_have_gradients_under_torch_func() -> None:
    def of_each(x: Tensor) -> Tensor:
        product = torch.func.grad(lambda rows: rows.prod(1).sum())(x)
        return product * torch.func.grad(loss)(x)

    assert peaks(of_each)["backward"] > 0
