"""Questions that are asked in Python; prints what ``--json`` prints, and exits so.

python -m tests.situations.in_python NAME [MODEL]
"""

import dataclasses
import json
import sys
from collections.abc import Callable

import torch

import budgetfit
from budgetfit.errors import BudgetfitError
from budgetfit.reporting.json import error_json, estimate_json, plan_json
from tests.situations import modules
from tests.situations.answer import DOES_NOT_FIT, FITS, USAGE


def unet() -> str:
    """Plan a UNet with a batch and a loss of its own."""
    return _diffusion(modules.unet, modules.unet_batch)


def dit() -> str:
    """Plan a diffusion transformer with a batch and a loss of its own."""
    return _diffusion(modules.dit, modules.dit_batch)


def accumulates(model: str) -> str:
    """Estimate a plan made without an effective batch size with 16 micro-batches."""
    made = budgetfit.plan(model, "24GB", precision="bf16")
    recipe = dataclasses.replace(made.recipe, gradient_accumulation_steps=16)
    return estimate_json(budgetfit.estimate(model, recipe, vram="24GB"))


def _diffusion(
    make: Callable[[], torch.nn.Module], batch: Callable[[], dict[str, torch.Tensor]]
) -> str:
    with torch.device("meta"):
        model = make()
    made = budgetfit.plan(
        model,
        gpu="rtx-4090",
        batch=batch(),
        loss=modules.noise_loss,
        effective_batch_size=32,
    )
    return plan_json(made)


QUESTIONS: dict[str, Callable[..., str]] = {
    "unet": unet,
    "dit": dit,
    "accumulates": accumulates,
}


def main(name: str, *words: str) -> int:
    """Ask; return the exit code that the command line would."""
    try:
        text = QUESTIONS[name](*words)
    except BudgetfitError as error:
        print(error_json(error))
        refused = isinstance(error, budgetfit.DoesNotFitError)
        return DOES_NOT_FIT if refused else USAGE
    print(text)
    fits = json.loads(text).get("estimate", json.loads(text))["fits"]
    return FITS if fits else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
