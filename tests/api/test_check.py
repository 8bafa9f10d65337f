"""A saved plan, checked again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import budgetfit
from budgetfit.core.plan import Plan
from budgetfit.errors import InputError
from tests.models import LLAMA, llama


@pytest.fixture
def config(tmp_path: Path) -> Path:
    LlamaConfig(
        **LLAMA, architectures=["LlamaForCausalLM"], model_type="llama"
    ).save_pretrained(tmp_path)
    return tmp_path


def planned(config: Path, **given: Any) -> Plan:
    settings: dict[str, Any] = {
        "gpu": "rtx-4090",
        "max_length": 32,
        "effective_batch_size": 8,
    }
    return budgetfit.plan(str(config), **{**settings, **given})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"method": "lora", "lora_r": 4, "target_modules": "q_proj"},
        {"gpu": None, "vram": "2GB", "precision": "fp32"},
        {"allocator": "expandable_segments:True", "headroom": "500MB"},
    ],
    ids=["full", "lora", "vram", "allocator"],
)
def test_a_plan_still_takes_what_was_planned(
    config: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    made = planned(config, **given)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    for plan in (made, loaded):
        found = budgetfit.check(plan)
        assert found.reserved_bytes == made.estimate.reserved_bytes
        assert found.usable_bytes == made.budget.usable_bytes
        assert found.fits


def test_on_a_card_that_is_too_small_it_does_not_fit(config: Path) -> None:
    plan = planned(config, precision="fp32")
    assert not budgetfit.check(plan, vram="540MB", headroom=0).fits
    assert budgetfit.check(plan, gpu="l4").fits


def test_a_card_that_cannot_run_the_precision_is_refused(config: Path) -> None:
    plan = planned(config, precision="bf16-mixed")
    with pytest.raises(InputError, match=r"bf16-mixed.*8\.0"):
        budgetfit.check(plan, gpu="t4")


def test_another_model_is_refused(config: Path, tmp_path: Path) -> None:
    plan = planned(config)
    plan.save(tmp_path / "plan.json")
    LlamaConfig(
        **{**LLAMA, "num_hidden_layers": 1}, architectures=["LlamaForCausalLM"]
    ).save_pretrained(config)
    with pytest.raises(InputError, match=r"parameters, not"):
        budgetfit.check(Plan.load(tmp_path / "plan.json"))


def test_a_plan_of_a_model_in_memory_needs_it_again(tmp_path: Path) -> None:
    model = llama()
    ids = torch.zeros(2, 24, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    made = budgetfit.plan(model, gpu="rtx-4090", batch=batch)
    assert budgetfit.check(made).fits
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(InputError, match="does not say which model"):
        budgetfit.check(loaded)
    with pytest.raises(InputError, match="made for a batch of"):
        budgetfit.check(loaded, model)
    found = budgetfit.check(loaded, model, batch=batch)
    assert found.reserved_bytes == made.estimate.reserved_bytes
