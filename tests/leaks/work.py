"""What is done over and over: plans, estimates, and training that is undone."""

import contextlib
from typing import Any

import torch
import transformers
from torch import nn

import budgetfit
from tests.cli.real_cli import CONFIG
from tests.fuzz.place import small
from tests.models import mean


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 4),
    )


def _mean(outputs: torch.Tensor, _: object) -> torch.Tensor:
    return outputs.float().mean()


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


def plan_chain(number: int) -> None:
    """Plan, apply, train a step and undo."""
    model = small()
    plan = budgetfit.plan(model, gpu="t4", batch_size=2 + number % 3, loss=mean)
    run = budgetfit.apply(plan)
    run.step(torch.zeros(plan.recipe.batch_size, 8))
    run.undo()


def plan_text_model(number: int) -> None:
    """Plan with every block recomputed, train a step and undo."""
    model = _gpt2()
    plan = budgetfit.plan(
        model, gpu="rtx-4090", batch_size=2 + number % 3, checkpointing="full"
    )
    ids = torch.zeros(plan.recipe.batch_size, 16, dtype=torch.long)
    with budgetfit.apply(plan) as run:
        run.step({"input_ids": ids, "labels": ids})


def estimate_images(number: int) -> None:
    """Predict settings that somebody has."""
    recipe = budgetfit.Recipe(batch_size=2 + number % 5, precision="bf16-mixed")
    budgetfit.estimate(
        _images(), recipe, gpu="l4", batch=torch.zeros(2, 3, 8, 8), loss=_mean
    )


def refuse(number: int) -> None:
    """Fail in a trace, and where nothing fits."""
    with contextlib.suppress(budgetfit.BudgetfitError):
        if number % 2:
            budgetfit.plan(_Fails(), gpu="t4")
        budgetfit.plan(small(), gpu="t4", vram="600MB", batch_size=10_000_000)


WORK: tuple[Any, ...] = (plan_chain, plan_text_model, estimate_images, refuse)


def work(number: int) -> None:
    """Do one piece of work; four numbers in a row do all kinds."""
    WORK[number % len(WORK)](number // len(WORK))
