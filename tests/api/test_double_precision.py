"""Weights in float64 are trained in float64 unless another precision is asked for."""

import torch
from torch import nn

import budgetfit
from budgetfit.api.compare import compare
from tests.models import Chain, squares

BATCH = {"x": torch.randn(8, 16, dtype=torch.float64)}
FOR = {"batch_size": 8, "effective_batch_size": 8}


def blocks() -> nn.Module:
    return Chain(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))


def planned(model: nn.Module, **options: object) -> budgetfit.Plan:
    return budgetfit.plan(
        model, gpu="rtx-4090", batch=BATCH, loss=squares, **FOR, **options
    )


def test_weights_in_float64_stay_so_and_it_is_said() -> None:
    model = blocks().double()
    expected = squares(model(**BATCH), BATCH).item()
    plan = planned(model)
    run = budgetfit.apply(plan, model)
    assert plan.recipe.precision == "as-is"
    assert any("float64 and are trained so" in text for text in plan.warnings)
    assert {each.dtype for each in model.parameters()} == {torch.float64}
    assert run.step(BATCH).item() == expected


def test_a_precision_that_casts_them_says_so() -> None:
    plan = planned(blocks().double(), precision="bf16-mixed")
    assert plan.recipe.precision == "bf16-mixed"
    assert any("this precision casts them" in text for text in plan.warnings)


def test_all_cards_are_compared_in_float64() -> None:
    model = blocks().double()
    rows, _ = compare(model, ["rtx-4090", "t4"], batch=BATCH, loss=squares, **FOR)
    assert {row.estimate.recipe.precision for row in rows} == {"as-is"}


def test_frozen_weights_in_float64_decide_nothing() -> None:
    model = blocks()
    model.blocks[0].double().requires_grad_(requires_grad=False)
    model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    model.blocks[0].register_forward_hook(lambda *of: of[-1].float())
    assert planned(model).recipe.precision == "bf16-mixed"
