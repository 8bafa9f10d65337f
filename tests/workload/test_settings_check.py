"""Settings that no count of parameters tells: dropout, activations, config numbers."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import Plan
from budgetfit.workload.settings_check import model_settings, warn_changed_settings
from tests.applying.small_models import batch_for, make
from tests.models import alone, mean


def tower(dropout: float = 0.1, activation: type[nn.Module] = nn.GELU) -> nn.Module:
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(8, 8), activation(), nn.Dropout(dropout))
            for _ in range(3)
        )
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return alone(
        budgetfit.plan(
            tower(), vram="1GB", batch=torch.zeros(2, 8), loss=mean, batch_size=2
        )
    )


@pytest.fixture(scope="module")
def of_a_config() -> Plan:
    asked: dict[str, Any] = {"batch": batch_for("gpt2"), "batch_size": 2}
    asked["checkpointing"] = "none"
    return alone(budgetfit.plan(make("gpt2"), vram="1GB", **asked))


def test_layers_without_parameters_are_counted_by_what_they_say() -> None:
    assert model_settings(tower()) == {
        "GELU(approximate='none')": 3,
        "Dropout(p=0.1, inplace=False)": 3,
    }


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (tower(dropout=0.0), r"3 layers Dropout\(p=0\.0, inplace=False\), not 0"),
        (tower(activation=nn.SiLU), r"0 layers GELU\(approximate='none'\), not 3"),
    ],
)
def test_other_layers_are_told_and_train(
    plan: Plan, model: nn.Module, text: str
) -> None:
    with pytest.warns(UserWarning, match=text), budgetfit.apply(plan, model) as run:
        assert run.model is model
    with pytest.warns(UserWarning, match=text):
        plan.prepare(model).undo()


def test_the_same_model_and_one_of_a_plan_that_knows_no_settings_say_nothing(
    plan: Plan, of_a_config: Plan, tmp_path: Path
) -> None:
    older = replace(plan, model=replace(plan.model, settings={}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_changed_settings(plan, tower())
        warn_changed_settings(older, tower(dropout=0.5))
        warn_changed_settings(of_a_config, make("gpt2"))
        of_a_config.save(tmp_path / "a.plan.json")
        loaded = Plan.load(tmp_path / "a.plan.json")
        assert loaded.model.settings == of_a_config.model.settings
        warn_changed_settings(loaded, make("gpt2"))


class Dicts(nn.Module):
    """A layer that shows the tensors it holds, as peft's VeRA has one."""

    def __init__(self, kind: str, shape: str = "4x8") -> None:
        super().__init__()
        self.text = f"(a): Buffer containing: [torch.{kind} of size {shape}]"

    def extra_repr(self) -> str:
        return self.text


def test_where_a_tensor_is_that_a_layer_shows_is_no_setting(plan: Plan) -> None:
    def with_dicts(*shown: str) -> nn.Module:
        return nn.Sequential(tower(), Dicts(*shown))

    on_meta = "Dicts((a): Buffer containing: [torch.meta.FloatTensor of size 4x8])"
    settings = {**plan.model.settings, on_meta: 1}  # as plans were saved
    planned = replace(plan, model=replace(plan.model, settings=settings))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("FloatTensor", "cuda.HalfTensor"):
            warn_changed_settings(planned, with_dicts(kind))
    with pytest.warns(UserWarning, match=r"1 layers Dicts.*: \[4x9\]\), not 0"):
        warn_changed_settings(planned, with_dicts("FloatTensor", "4x9"))


def test_numbers_of_a_config_are_compared_where_both_have_them(
    of_a_config: Plan,
) -> None:
    model: Any = make("gpt2")
    model.config.new_in_a_release = 1
    model.config.bos_token_id = 7
    model.config.use_cache = not model.config.use_cache
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_changed_settings(of_a_config, model)
    model.config.attn_pdrop = 0.75
    with pytest.warns(UserWarning, match=r"config\.attn_pdrop is 0\.75, not 0\.1"):
        warn_changed_settings(of_a_config, model)


def test_layers_of_adapters_that_do_not_run_are_no_settings() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=r".*\.0", lora_dropout=0.2)
    model = peft.get_peft_model(tower(), config)
    name = "Dropout(p=0.2, inplace=False)"
    one = model_settings(model)
    assert one[name] == 3
    model.add_adapter("ref", config)  # as TRL's DPOTrainer does
    assert model_settings(model) == one
    model.base_model.set_adapter(["default", "ref"])  # both run
    assert model_settings(model)[name] == 6


def test_a_config_may_hold_any_number(of_a_config: Plan, tmp_path: Path) -> None:
    model = make("gpt2")
    model.config.max_relative_positions = -1  # as DeBERTa's
    model.config.vision_feature_layer = -2  # as LLaVA's
    model.config.time_limit = float("inf")
    settings = model_settings(model)
    saved = replace(of_a_config, model=replace(of_a_config.model, settings=settings))
    saved.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.model.settings == settings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_changed_settings(loaded, model)
