"""The memory that exports print: a saved plan's, in another library's loop."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import budgetfit
from budgetfit.api.in_loop import plan_in_loop
from budgetfit.core.loop import RUN
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Segment
from tests.api.planned import plan_of_config, write_config

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("kept_traces")


def saved(config: Path, **given: Any) -> Plan:
    """Return a plan as it is loaded."""
    made = plan_of_config(config, **given)
    return Plan.from_json(made.to_json())


# One recipe: what is found out is its memory.
QUICK: dict[str, Any] = {
    "batch_size": 4,
    "effective_batch_size": 4,
    "precision": "bf16-mixed",
    "checkpointing": "none",
}


@pytest.fixture(scope="module")
def varying(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan over lengths, of a config that stays where it is."""
    config = write_config(tmp_path_factory.mktemp("config"))
    return saved(config, lengths={8: 5, 24: 2, 32: 1}, **QUICK)


def test_a_plan_for_several_gpus_keeps_its_own_figure(config: Path) -> None:
    plan = saved(config, **QUICK)
    several = Parallelism(engine="ddp", gpus=2)
    plan = plan.changed(recipe=replace(plan.recipe, parallelism=several))
    assert plan_in_loop(plan, "trainer") == plan
    assert plan.estimate.loop == RUN


def test_adapters_have_the_loops_figure(config: Path) -> None:
    plan = saved(config, method="lora", lora_r=4, **QUICK)
    with warnings.catch_warnings(action="error", category=UserWarning):
        found = plan_in_loop(plan, "accelerate")
    assert found.estimate.loop.kind == "accelerate"
    # Its loop holds the outputs: fp32 logits of 4 x 32 x the vocabulary.
    assert found.estimate.allocated_bytes > plan.estimate.allocated_bytes


def test_lengths_are_replayed_in_the_loop_with_expandable_segments(
    varying: Plan,
) -> None:
    found = plan_in_loop(varying, "trainer").estimate
    assert found.loop.kind == "trainer"
    document = json.loads(varying.to_json())
    del document["provenance"]["asked"]["lengths"]
    older = plan_in_loop(Plan.from_json(json.dumps(document)), "trainer").estimate
    assert older.loop.kind == "trainer"
    assert older.reserved_bytes >= varying.estimate.reserved_bytes


def test_a_rank_keeps_its_share_of_host_memory(config: Path) -> None:
    given: dict[str, Any] = {**QUICK, "effective_batch_size": 8}
    plan = saved(config, gpus=2, engine="ddp", lengths={8: 5, 32: 1}, **given)
    assert plan.recipe.longest_batch_first
    moved = Segment(plan.model.blocks[:1], mode="offload")
    recipe = replace(plan.recipe, segments=(moved,))
    pinned = budgetfit.estimate(
        str(config), recipe, gpu="rtx-4090", max_length=32
    ).host_bytes
    for share, fits in ((pinned * 3 // 2, True), (pinned // 2, False)):
        budget = replace(plan.budget, host_ram_bytes=share)
        estimate = replace(plan.estimate, recipe=recipe)
        asked = plan.changed(budget=budget, recipe=recipe, estimate=estimate)
        assert plan_in_loop(asked, "run").estimate.fits == fits


def test_a_model_that_is_gone_is_told(config: Path) -> None:
    plan = saved(config, **QUICK)
    shutil.rmtree(config)
    with pytest.warns(UserWarning, match=r"memory is that of budgetfit\.Run"):
        assert plan_in_loop(plan, "trainer") == plan


def test_what_a_loop_cannot_do_and_an_unknown_model_are_passed_over(
    config: Path,
) -> None:
    plan = saved(config, optimizer_in_backward=True, **QUICK)
    document = json.loads(saved(config, **QUICK).to_json())
    document["provenance"]["asked"]["model"] = None
    with warnings.catch_warnings(action="error", category=UserWarning):
        for each in (plan, Plan.from_json(json.dumps(document))):
            assert plan_in_loop(each, "trainer") == each


def test_a_script_of_torch_expands_segments_where_a_run_begins_with_the_longest(
    config: Path, varying: Plan
) -> None:
    assert varying.recipe.longest_batch_first
    found = plan_in_loop(varying, "run")
    assert found.estimate.loop == RUN
    assert found.estimate.reserved_bytes != varying.estimate.reserved_bytes
    wanted = "Start it with PYTORCH_ALLOC_CONF=expandable_segments:True."
    assert wanted in varying.to_torch_script()
    fixed = saved(config, **QUICK)
    assert plan_in_loop(fixed, "run") == fixed
    assert wanted not in fixed.to_torch_script()
