"""``allocator=``: from the argument or the environment to the plan and its training."""

import json
import warnings

import pytest
import torch

import budgetfit
from budgetfit import InputError, Plan
from budgetfit.applying.allocator_settings import (
    other_settings,
    running_settings,
    warn_of_other_settings,
)
from budgetfit.core.allocator.settings import VARIABLE, VARIABLES, AllocatorSettings
from budgetfit.inputs.allocator_settings import find_allocator_settings
from budgetfit.integrations.source_code import plain_torch
from budgetfit.measuring import subprocess_run
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.api.planned import CARD, SAMPLE_OF_MEBI, plan_mebi
from tests.models import MIB, Mebi, alone

EXPANDABLE = "expandable_segments:True"
ROUNDED = "roundup_power2_divisions:[1:1,>:2]"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def small_plan(**options: str) -> Plan:
    settings = {"batch_size": 2, "checkpointing": "none", **options}
    return alone(plan_mebi(200, **settings))


@pytest.fixture(scope="module")
def expandable() -> Plan:
    return small_plan(allocator=EXPANDABLE)


def test_a_plan_is_judged_with_its_settings(expandable: Plan) -> None:
    session = TraceSession(
        Workload(
            model=Mebi(6), batch=SAMPLE_OF_MEBI, gpu=expandable.gpu
        ).with_found_blocks()
    )
    judged = replay(
        session.exact(expandable.recipe),
        expandable.recipe.batch_size,
        expandable.gpu,
        limit_bytes=UNLIMITED_BYTES,
        settings=AllocatorSettings(expandable_segments=True),
    )
    assert expandable.estimate.reserved_bytes == judged.reserved_bytes
    assert expandable.budget.allocator.expandable_segments


def test_an_estimate_has_the_settings_too() -> None:
    small, large = (
        budgetfit.estimate(
            Mebi(2), gpu=CARD, batch=SAMPLE_OF_MEBI, allocator=text
        ).reserved_bytes
        for text in ("", "large_segment_size_mb:64")
    )
    assert small < large
    assert large >= 64 * MIB


def test_the_plan_says_what_to_export_and_keeps_it(expandable: Plan) -> None:
    text = str(expandable)
    assert text.count(f"export {VARIABLE}={EXPANDABLE}") >= 1
    assert f"  {VARIABLE}={EXPANDABLE}\n" in text
    again = Plan.from_json(expandable.to_json())
    assert again.budget == expandable.budget
    assert str(again).split("NEXT")[1] == text.split("NEXT")[1]


def test_lists_are_quoted_for_the_shell() -> None:
    made = small_plan(allocator=ROUNDED)
    assert f"export {VARIABLE}='{ROUNDED}'" in str(made)


def test_plans_of_earlier_versions_have_pytorchs_defaults(expandable: Plan) -> None:
    document = json.loads(expandable.to_json())
    del document["budget"]["allocator"], document["budget"]["allowed_bytes"]
    assert Plan.from_json(json.dumps(document)).budget.allocator.is_default


def test_a_damaged_setting_in_a_saved_plan_is_named(expandable: Plan) -> None:
    document = json.loads(expandable.to_json())
    document["budget"]["allocator"]["max_split_bytes"] = MIB
    with pytest.raises(InputError, match=r"damaged at 'budget.allocator"):
        Plan.from_json(json.dumps(document))


def test_a_fraction_of_the_card_is_what_is_usable() -> None:
    whole, half = (
        budgetfit.plan(
            Mebi(2), gpu=CARD, batch=SAMPLE_OF_MEBI, batch_size=1, allocator=text
        )
        for text in ("", "per_process_memory_fraction:0.5")
    )
    assert half.budget.usable_bytes == whole.gpu.total_bytes // 2
    assert half.budget.usable_bytes < whole.budget.usable_bytes


def test_every_export_names_the_variable(expandable: Plan) -> None:
    line = f"Allocator: export {VARIABLE}={EXPANDABLE} before this starts."
    assert line in plain_torch.export_text(expandable, "plan.json")


@pytest.mark.parametrize("text", ["expandable_segments:true", "max_split_size_mb"])
def test_settings_that_pytorch_refuses_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="PyTorch would refuse the allocator settings"):
        small_plan(allocator=text)


# -- from the environment -------------------------------------------------------------


def test_this_process_decides_where_it_has_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, EXPANDABLE)
    settings, notes = find_allocator_settings(None, is_here=True)
    assert settings.expandable_segments
    assert notes == (f"predicted with {VARIABLE}={EXPANDABLE}, as set in this process",)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    assert find_allocator_settings(None, is_here=True) == (AllocatorSettings(), ())


def test_on_windows_segments_do_not_expand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{EXPANDABLE},max_split_size_mb:64")
    monkeypatch.setattr("sys.platform", "win32")
    settings, _ = find_allocator_settings(None, is_here=True)
    assert settings == AllocatorSettings(max_split_bytes=64 * MIB)


def test_another_card_gets_defaults_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "anything")
    settings, notes = find_allocator_settings(None, is_here=False)
    assert settings.is_default
    assert "predicted without; allocator= predicts" in notes[0]
    monkeypatch.delenv(VARIABLE)
    assert find_allocator_settings(None, is_here=False) == (AllocatorSettings(), ())


def test_what_is_given_counts_more_than_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "max_split_size_mb:64")
    settings, notes = find_allocator_settings(EXPANDABLE, is_here=True)
    assert settings == AllocatorSettings(expandable_segments=True)
    assert f"export {VARIABLE}={EXPANDABLE}" in notes[0]
    assert find_allocator_settings("", is_here=True) == (AllocatorSettings(), ())
    assert find_allocator_settings(settings, is_here=True)[0] is settings


# -- where training runs --------------------------------------------------------------


def test_other_settings_than_planned_are_said_once_and_how_to_set_them(
    expandable: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = other_settings(expandable)
    assert said is not None
    assert f"Export {VARIABLE}={EXPANDABLE} before Python starts" in said
    with pytest.warns(UserWarning, match="The plan is for the allocator settings"):
        warn_of_other_settings(expandable, torch.device("cuda"))
    monkeypatch.setenv(VARIABLE, f"pinned_use_background_threads:True,{EXPANDABLE}")
    assert running_settings() == expandable.budget.allocator
    assert other_settings(expandable) is None


def test_a_plan_for_defaults_says_what_to_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = small_plan()
    assert other_settings(made) is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    said = other_settings(made)
    assert said is not None
    assert "Unset PYTORCH_CUDA_ALLOC_CONF before Python starts" in said


def test_on_a_cpu_nothing_is_said(expandable: Plan) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_other_settings(expandable, torch.device("cpu"))
        warn_of_other_settings(None, torch.device("cuda"))
    assert said == []


def test_a_fresh_process_has_the_settings_of_the_plan(
    expandable: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    seen: dict[str, str] = {}

    def run(*_: object, env: dict[str, str], **__: object) -> None:
        seen.update(env)

    monkeypatch.setattr(subprocess_run.subprocess, "run", run)
    subprocess_run._run(["plan.json"], expandable.budget.allocator)
    assert seen[VARIABLE] == EXPANDABLE
    assert "PYTORCH_CUDA_ALLOC_CONF" not in seen
