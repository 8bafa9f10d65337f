"""What a plan without an effective batch size says of accumulating."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import budgetfit
from budgetfit import Estimate, Plan, Recipe
from budgetfit.planning.session import PlanningSession
from tests.models import MIB, Mebi, mean


def plan(vram: int, **several: Any) -> Plan:
    return budgetfit.plan(
        Mebi(),
        gpu="rtx-4090",
        vram=vram,
        batch=torch.zeros(2, 512),
        loss=mean,
        batch_size=2,
        headroom=0,
        **several,
    )


@pytest.mark.parametrize(
    ("room", "several", "how"),
    [
        (700 * MIB, {}, "fits ("),
        (2400 * MIB, {"gpus": 8, "engine": "fsdp2"}, "fits with sync_each_batch=True"),
    ],
)
def test_what_is_promised_fits_with_any_number_of_micro_batches(
    room: int, several: dict[str, Any], how: str
) -> None:
    made = plan(room, **several)
    (said,) = [each for each in made.warnings if "gradient_accumulation_steps" in each]
    assert f"any gradient_accumulation_steps {how}" in said
    for steps in (2, 3, 4, 16):
        estimate = budgetfit.estimate(
            Mebi(),
            replace(made.recipe, gradient_accumulation_steps=steps),
            gpu="rtx-4090",
            vram=room,
            batch=torch.zeros(2, 512),
            loss=mean,
            headroom=0,
        )
        assert estimate.fits


def test_more_than_two_are_not_promised_where_they_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = PlanningSession.judge

    def judged(session: PlanningSession, recipe: Recipe) -> Estimate:
        found = real(session, recipe)
        if recipe.gradient_accumulation_steps > 2:
            above = session.budget.usable_bytes + MIB
            return replace(found, reserved_bytes=above, fits=False)
        return found

    monkeypatch.setattr(PlanningSession, "judge", judged)
    made = plan(700 * MIB)
    (said,) = [each for each in made.warnings if "gradient_accumulation_steps" in each]
    assert "may be 1 or 2: with more, " in said
    assert made.recipe.gradient_accumulation_steps == 1
