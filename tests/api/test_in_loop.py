"""The memory that exports print: a saved plan's, in another library's loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import LlamaConfig

import budgetfit
from budgetfit.api.in_loop import plan_in_loop
from budgetfit.core.loop import RUN
from budgetfit.core.plan import Plan
from tests.models import LLAMA

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    LlamaConfig(
        **LLAMA, architectures=["LlamaForCausalLM"], model_type="llama"
    ).save_pretrained(tmp_path)
    return tmp_path


def saved(config: Path, **given: Any) -> Plan:
    """Return a plan as it is loaded."""
    settings: dict[str, Any] = {
        "gpu": "rtx-4090",
        "max_length": 32,
        "effective_batch_size": 8,
    }
    made = budgetfit.plan(str(config), **{**settings, **given})
    return Plan.from_json(made.to_json())


def test_a_plan_for_several_gpus_keeps_its_own_figure(config: Path) -> None:
    plan = saved(config, gpus=2, engine="ddp", batch_size=2)
    assert plan_in_loop(plan, "trainer") == plan
    assert plan.estimate.loop == RUN
