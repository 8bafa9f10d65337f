"""One micro-batch per update frees gradients that others keep."""

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import Recipe
from budgetfit.inputs.target_gpu import find_target_gpu
from budgetfit.planning.alternatives.alternatives import ROOM_FOR_GRADIENTS
from budgetfit.planning.search.accumulation import ACCUMULATING
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


def test_without_an_effective_batch_no_room_is_left_for_accumulated_gradients() -> None:
    # Two micro-batches of one sample fit, as does one of four or five.
    made = budgetfit.plan(
        model(),
        vram=reserved(SAMPLES, 1) + CARD.budget("0").context_bytes,
        precision="fp32",
        **GIVEN,
    )
    assert (made.recipe.batch_size, made.recipe.segments) == (5, ())
    assert reserved(5, 1) == reserved(SAMPLES, 1)
    assert any("has to stay 1" in each for each in made.warnings)
    rows = {each.label: each for each in made.alternatives}
    assert not rows[ACCUMULATING].fits
    room = rows[ROOM_FOR_GRADIENTS]
    assert room.is_suggestion
    assert reserved(room.estimate.recipe.batch_size, 2) == room.estimate.reserved_bytes
    assert room.estimate.reserved_bytes <= made.budget.usable_bytes
    assert room.estimate.samples_per_s < made.estimate.samples_per_s
