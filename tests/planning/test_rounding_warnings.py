import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.core.recipe import Recipe
from budgetfit.planning.reports.recipe_warnings import rounding_warnings
from tests.models import Mebi, mean


def warns(model: nn.Module, precision: str) -> bool:
    return bool(rounding_warnings(model, Recipe(batch_size=1, precision=precision)))


def test_an_update_of_a_fifth_of_a_per_cent_is_lost_in_bf16() -> None:
    weights = torch.linspace(1, 2, 1000, dtype=torch.bfloat16)
    assert torch.equal(weights * (1 + 0.0019), weights)
    assert not torch.equal(weights * (1 + 0.0021), weights)


@pytest.mark.parametrize(
    ("precision", "dtype", "expected"),
    [
        ("bf16", torch.float32, True),
        ("bf16-mixed", torch.bfloat16, False),  # weights are cast to fp32
        ("fp32", torch.float32, False),
        ("as-is", torch.float32, False),
        ("as-is", torch.bfloat16, True),
    ],
)
def test_weights_that_are_trained_in_bf16_are_said(
    precision: str, dtype: torch.dtype, expected: bool
) -> None:
    assert warns(nn.Linear(2, 2).to(dtype), precision) is expected


def test_frozen_weights_may_be_in_bf16() -> None:
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2))
    model[0].requires_grad_(requires_grad=False)
    assert not warns(model, "as-is")


def test_a_plan_says_it() -> None:
    plan = budgetfit.plan(
        Mebi(), gpu="rtx-4090", batch=torch.zeros(2, 512), loss=mean, precision="bf16"
    )
    assert any("trained in bf16" in line for line in plan.warnings)
