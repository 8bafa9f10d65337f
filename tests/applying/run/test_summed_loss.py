"""A loss that is a sum over samples is told from a mean, or from several losses."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as in torch's documentation
from torch import Tensor, nn

from budgetfit.applying.run.run import Run
from budgetfit.applying.run.summed_loss import is_sum
from tests.applying.ranks.training_runs import recipe
from tests.reporting.sample_plans import sample_model, sample_plan

SAMPLES, CLASSES = 4, 3
LABELS = torch.tensor([0, 1, 2, 0])
NEAR = torch.zeros(SAMPLES, CLASSES)
Loss = Callable[[Tensor], Tensor]

SUMS: dict[str, Loss] = {
    "cross entropy": lambda x: F.cross_entropy(x, LABELS, reduction="sum"),
    "squares": lambda x: F.mse_loss(x, NEAR, reduction="sum"),
    "distances": lambda x: F.l1_loss(x, NEAR, reduction="sum"),
    "by hand": lambda x: x.square().sum(),
    "cast": lambda x: F.mse_loss(x, NEAR, reduction="sum").double(),
    "an autoencoder's": lambda x: (
        F.binary_cross_entropy_with_logits(x, NEAR, reduction="sum")
        - 0.5 * torch.sum(1 + x - x.exp())
    ),
}
OTHERS: dict[str, Loss] = {
    "cross entropy": lambda x: F.cross_entropy(x, LABELS),
    "a mean by hand": lambda x: x.square().sum() / len(x),
    "a mean of sums": lambda x: x.square().sum(1).mean(),
    "mean over the batch": lambda x: F.kl_div(x, NEAR, reduction="batchmean"),
    "of tasks": lambda x: torch.stack([x.mean(), x[0].mean(), x[1, 1], x[2, 1]]).sum(),
    "with a decay": lambda x: x.mean() + x.square().sum(),
    "of weights": lambda x: x.T.square().sum(),
    "a norm": torch.linalg.vector_norm,
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_told(name: str) -> None:
    x = torch.rand(SAMPLES, CLASSES, requires_grad=True)
    assert is_sum(SUMS[name](x), SAMPLES)


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_be_no_sum_is_none(name: str) -> None:
    x = torch.rand(SAMPLES, CLASSES, requires_grad=True)
    assert not is_sum(OTHERS[name](x), SAMPLES)


@pytest.mark.parametrize(
    ("steps", "weight", "loss", "count"),
    [
        (2, {}, SUMS["squares"], 1),
        (2, {"weight": 1}, SUMS["squares"], 0),
        (1, {}, SUMS["squares"], 0),
        (2, {}, OTHERS["a mean of sums"], 0),
    ],
)
def test_a_sum_is_said_once_where_it_is_accumulated(
    steps: int, weight: dict[str, float], loss: Loss, count: int
) -> None:
    run = Run(
        nn.Linear(5, CLASSES),
        recipe(SAMPLES, steps),
        loss=lambda out, _: loss(out),
        plan=sample_plan(model=sample_model(batch={})),
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            run.step(torch.rand(SAMPLES, 5), **weight)
    texts = [str(each.message) for each in said]
    assert ["This loss is a sum" in text for text in texts] == [True] * count
