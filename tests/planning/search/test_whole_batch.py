"""One micro-batch per update frees gradients that others keep."""

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import Recipe
from budgetfit.inputs.target_gpu import find_target_gpu
from budgetfit.planning.alternatives.alternatives import ONCE
from tests.models import Chain, mean

SAMPLES = 4
CARD = find_target_gpu(None, "rtx-4090")


def model() -> nn.Module:
    """Blocks of a weight of 16 MiB; a sample leaves 2 MiB in each."""
    return Chain(
        *(nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Tanh()) for _ in range(4))
    )


GIVEN = {
    "gpu": "rtx-4090",
    "batch": torch.zeros(2, 128, 2048),
    "loss": mean,
    "headroom": 0,
}


def reserved(batch_size: int, steps: int) -> int:
    recipe = Recipe(batch_size=batch_size, gradient_accumulation_steps=steps)
    return budgetfit.estimate(model(), recipe, **GIVEN).reserved_bytes


@pytest.mark.parametrize("checkpointing", ["auto", "none"])
def test_what_fits_without_accumulated_gradients_is_the_plan(
    checkpointing: str,
) -> None:
    whole_bytes, accumulating_bytes = reserved(SAMPLES, 1), reserved(SAMPLES, 2)
    assert whole_bytes < accumulating_bytes
    made = budgetfit.plan(
        model(),
        vram=whole_bytes + CARD.budget("0").context_bytes,
        precision="fp32",
        effective_batch_size=SAMPLES,
        checkpointing=checkpointing,
        **GIVEN,
    )
    assert (made.recipe.batch_size, made.recipe.segments) == (SAMPLES, ())
    kept = made.lazy_alternatives.known[0]
    assert (kept.label, kept.estimate.recipe) == ("everything kept", made.recipe)


def test_rows_name_what_is_faster_without_accumulation() -> None:
    # Two micro-batches of one sample fit, as does one of four.
    made = budgetfit.plan(
        model(),
        vram=reserved(SAMPLES, 1) + CARD.budget("0").context_bytes,
        precision="fp32",
        **GIVEN,
    )
    row = next(each for each in made.alternatives if each.label == ONCE)
    assert row.is_suggestion
    assert row.estimate.recipe.gradient_accumulation_steps == 1
    assert row.estimate.samples_per_s > 1.02 * made.estimate.samples_per_s
    assert f"effective_batch_size={row.estimate.recipe.batch_size}" in row.note


@pytest.mark.parametrize(("checkpointing", "told"), [("full", True), ("none", False)])
def test_a_plan_that_frees_room_for_gradients_says_so(
    checkpointing: str, *, told: bool
) -> None:
    made = budgetfit.plan(
        model(), vram="1GiB", batch_size=2, checkpointing=checkpointing, **GIVEN
    )
    (note,) = [each for each in made.warnings if "accumulation_steps fits" in each]
    assert ("whether exactly one is faster" in note) == told
