"""Blocks may be named as the model has them, also where something wraps the model."""

from typing import Any

import pytest
from transformers import LlamaConfig

import budgetfit
from budgetfit import Estimate, InputError, Recipe, Segment
from budgetfit.api.estimate import estimate_settings
from tests.api.planned import CARD
from tests.models import LENGTH, LLAMA

pytestmark = pytest.mark.usefixtures("kept_traces")

# As many blocks as are traced with fewer of them.
CONFIG = LlamaConfig(**{**LLAMA, "num_hidden_layers": 8})
SETTINGS: dict[str, Any] = {"gpu": CARD, "max_length": LENGTH, "method": "lora"}
OF_THE_BASE, ITS_END = "model.layers.5", "layers.5"
UNDER_PEFT = f"base_model.model.{OF_THE_BASE}"


def estimated(*blocks: str, **settings: Any) -> Estimate:
    recipe = Recipe(batch_size=2, segments=tuple(Segment((each,)) for each in blocks))
    return budgetfit.estimate(CONFIG, recipe, **{**SETTINGS, **settings})


@pytest.mark.parametrize("name", [OF_THE_BASE, ITS_END])
def test_the_base_models_names_in_a_recipe_mean_peft_s(name: str) -> None:
    pytest.importorskip("peft")
    assert estimated(name) == estimated(UNDER_PEFT)
    assert estimated(name).recipe.wrapped_blocks == (UNDER_PEFT,)


def test_the_base_models_names_are_a_checkpointing_too() -> None:
    pytest.importorskip("peft")
    asked: dict[str, Any] = {"checkpointing": [OF_THE_BASE], "batch_size": 2}
    plan = budgetfit.plan(CONFIG, **asked, **SETTINGS)
    found, _ = estimate_settings(CONFIG, **asked, **SETTINGS)
    assert plan.recipe.wrapped_blocks == (UNDER_PEFT,)
    assert found.recipe.wrapped_blocks == (UNDER_PEFT,)


def test_two_names_of_one_block_are_one_too_many() -> None:
    pytest.importorskip("peft")
    with pytest.raises(InputError, match="more than one segment"):
        estimated(OF_THE_BASE, UNDER_PEFT)


@pytest.mark.parametrize("method", ["lora", None])
def test_what_is_no_block_is_refused_with_the_nearest(method: str | None) -> None:
    if method is not None:
        pytest.importorskip("peft")
    with pytest.raises(InputError, match=r"no block 'model\.layers\.8'\. Did you mean"):
        estimated("model.layers.8", method=method)


def test_a_part_of_a_block_may_be_recomputed_for_itself() -> None:
    kept, part, whole = (
        estimated(*blocks, method=None)
        for blocks in ((), (f"{OF_THE_BASE}.mlp",), (OF_THE_BASE,))
    )
    peaks = [each.phase_peaks_bytes["forward"] for each in (whole, part, kept)]
    assert peaks == sorted(set(peaks))
