"""plan and estimate answer the same where they are asked the same."""

import json
from pathlib import Path
from typing import Any

import pytest

import budgetfit
from budgetfit import Estimate
from budgetfit.api.estimate import estimate_settings
from tests.integrations.adapters import CONFIG, QUIET

pytestmark = QUIET

# Without a dtype of its own, and quantised already.
STORED: dict[str, dict[str, Any]] = {
    "bf16": {},
    "no dtype": {"dtype": None},
    "fp8": {"quantization_config": {"quant_method": "fp8"}},
    "int8": {"quantization_config": {"load_in_8bit": True}},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"method": "lora", "lora_r": 4},
    "qlora": {"method": "qlora", "double_quantization": False},
    "not prepared": {"method": "qlora", "prepare_for_kbit": False},
}


def numbers(found: Estimate) -> tuple[Any, ...]:
    return (
        found.recipe,
        found.timeline,
        found.reserved_bytes,
        found.usable_bytes,
        found.process_range_bytes,
        found.step_ms,
        found.fits,
    )


@pytest.mark.parametrize(
    ("stored", "adapters", "settings"),
    [
        ("bf16", "full", ("t4", "auto", "full")),
        ("bf16", "qlora", ("t4", "auto", "none")),
        ("bf16", "not prepared", ("rtx-4090", "bf16", "full")),
        ("no dtype", "lora", ("rtx-4090", "as-is", "none")),
        ("fp8", "lora", ("rtx-4090", "auto", "full")),
        ("int8", "qlora", ("rtx-4090", "auto", "none")),
    ],
)
def test_settings_by_name_and_a_plans_recipe_take_what_the_plan_says(
    tmp_path: Path, stored: str, adapters: str, settings: tuple[str, str, str]
) -> None:
    """By name is how the command line asks; a recipe is how Python does."""
    if "qlora" in ADAPTERS[adapters].values() or stored == "int8":
        pytest.importorskip("bitsandbytes")
    gpu, precision, checkpointing = settings
    fields = {**CONFIG, "model_type": "llama", **STORED[stored]}
    fields = {name: value for name, value in fields.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    asked: dict[str, Any] = {"gpu": gpu, "max_length": 24, **ADAPTERS[adapters]}
    plan = budgetfit.plan(
        str(tmp_path),
        batch_size=2,
        effective_batch_size=4,
        precision=precision,
        checkpointing=checkpointing,
        **asked,
    )
    again = budgetfit.estimate(str(tmp_path), plan.recipe, **asked)
    by_name, model = estimate_settings(
        str(tmp_path),
        batch_size=2,
        effective_batch_size=4,
        precision=precision,
        checkpointing=checkpointing,
        loop="run",
        **asked,
    )
    assert numbers(again) == numbers(plan.estimate)
    assert numbers(by_name) == numbers(plan.estimate)
    assert model == plan.model
    # And say the same of what was assumed.
    assert set(again.notes) == set(by_name.notes)
    assert {note for note in plan.warnings if "dtype" in note or "stored" in note} <= (
        set(again.notes)
    )


def test_as_it_is_names_the_dtype_that_the_weights_have(tmp_path: Path) -> None:
    found = {}
    for name, more in {"bf16": {}, "lora": ADAPTERS["lora"]}.items():
        fields = {**CONFIG, "model_type": "llama"}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        found[name] = budgetfit.estimate(
            str(tmp_path), gpu="rtx-4090", max_length=24, **more
        )
    assert found["bf16"].as_is == "bf16"
    assert found["lora"].as_is == "bf16 frozen, fp32 trained"
    assert "as-is: weights bf16, no autocast" in str(found["bf16"])
