"""budgetfit.plan, end to end: what it returns fits, and is what was asked for."""

import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import DoesNotFitError
from budgetfit.core.plan import Plan
from budgetfit.gpus.table import find_gpu
from budgetfit.inputs import arguments
from tests.api.planned import (
    CARD,
    KINDS,
    SAMPLE_OF_MEBI,
    plan_mebi,
    planned,
    vram_bytes,
)
from tests.models import EXAMPLES, MIB, Mebi

pytestmark = pytest.mark.usefixtures("kept_traces")

# Kept, one sample of the six blocks takes 54 MiB; recomputed, 50.
BUDGETS = (52, 90, 120, 240)
mebi = functools.cache(plan_mebi)


def ms_per_sample(plan: Plan) -> float:
    return plan.estimate.step_ms / plan.recipe.effective_batch_size


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_gets_a_plan_that_fits(kind: str) -> None:
    plan = planned(kind).plan
    assert plan.fits
    assert plan.estimate.fits
    assert plan.estimate.reserved_bytes <= plan.budget.usable_bytes
    assert plan.estimate.allocated_bytes <= plan.estimate.reserved_bytes
    assert plan.recipe == plan.estimate.recipe
    assert set(plan.recipe.wrapped_blocks) <= set(plan.model.blocks)
    assert len(plan.model.blocks) >= 2
    assert sum(plan.estimate.at_peak_bytes.values()) == plan.estimate.allocated_bytes
    assert set(plan.estimate.phase_peaks_bytes) == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize("kind", KINDS)
def test_planning_leaves_the_model_and_the_process_as_they_were(kind: str) -> None:
    found = planned(kind)
    found.after.assert_equal(found.before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_prints_the_answer_first(kind: str) -> None:
    plan = planned(kind).plan
    text = str(plan)
    assert text.startswith(plan.model.name)
    assert "RECOMMENDED" in text
    assert "FITS" in text
    assert f"batch_size {plan.recipe.batch_size}" in text
    assert f"precision {plan.recipe.precision}" in text
    assert "ALTERNATIVES" not in text


@pytest.mark.parametrize("kind", ["gpt2", "module list", "sequential"])
def test_a_saved_plan_is_read_back_as_it_was(kind: str, tmp_path: Path) -> None:
    plan = planned(kind).plan
    assert "ALTERNATIVES" in plan.details()
    path = tmp_path / "plan.json"
    plan.save(path)
    assert budgetfit.Plan.load(path) == plan
    assert str(budgetfit.Plan.load(path)) == str(plan)


def test_blocks_are_recomputed_where_the_batch_does_not_fit_otherwise() -> None:
    plan = planned("module list").plan
    # 8 samples, all kept: 114 MiB in a budget of 100
    assert plan.recipe.batch_size == 8
    assert plan.recipe.wrapped_blocks
    (kept,) = [row for row in plan.alternatives if row.label == "everything kept"]
    assert not kept.fits
    assert kept.estimate.reserved_bytes == 114 * MIB


def test_a_larger_budget_never_gives_a_slower_plan() -> None:
    plans = [mebi(mib) for mib in BUDGETS]
    for smaller, larger in pairwise(plans):
        assert ms_per_sample(larger) <= ms_per_sample(smaller)


def test_a_larger_budget_never_gives_a_smaller_largest_batch() -> None:
    sizes = [mebi(mib, objective="batch_size").recipe.batch_size for mib in BUDGETS]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 1


def test_each_objective_wins_what_it_looks_for() -> None:
    fast = mebi(120)
    large = mebi(120, objective="batch_size")
    small = mebi(120, objective="memory")
    assert ms_per_sample(fast) <= min(map(ms_per_sample, (large, small)))
    assert large.recipe.batch_size > max(
        fast.recipe.batch_size, small.recipe.batch_size
    )
    assert small.estimate.reserved_bytes < min(
        fast.estimate.reserved_bytes, large.estimate.reserved_bytes
    )
    assert small.recipe.batch_size == 1


def test_checkpointing_policies_are_followed() -> None:
    blocks = mebi(120).model.blocks
    assert blocks == tuple(f"blocks.{index}" for index in range(6))
    assert mebi(120, checkpointing="none").recipe.segments == ()
    full = mebi(120, checkpointing="full").recipe.segments
    assert [segment.blocks for segment in full] == [(name,) for name in blocks]
    sqrt = mebi(120, checkpointing="sqrt").recipe.segments
    # 6 blocks in about sqrt(6) segments
    assert [len(segment.blocks) for segment in sqrt] == [3, 3]
    named = mebi(120, checkpointing=("blocks.4", "blocks.1")).recipe
    assert named.wrapped_blocks == ("blocks.1", "blocks.4")


def test_as_it_is_keeps_what_the_model_recomputes_itself() -> None:
    model = EXAMPLES["gpt2"].model()
    switch_on = getattr(model, "activation_checkpointing_enable", None)
    (switch_on or model.gradient_checkpointing_enable)()
    options: dict[str, Any] = {
        "gpu": CARD,
        "batch": EXAMPLES["gpt2"].batch,
        "batch_size": 16,  # what is recomputed outweighs a workspace (torch 2.11)
        "precision": "as-is",
    }

    as_is = budgetfit.plan(model, checkpointing="as-is", **options)
    none = budgetfit.plan(model, checkpointing="none", **options)

    assert as_is.recipe.wrapped_blocks == as_is.model.blocks
    assert as_is.estimate.allocated_bytes < none.estimate.allocated_bytes
    assert none.recipe.segments == ()
    assert model.transformer.h[0].gradient_checkpointing is True


@pytest.mark.parametrize("effective", [1, 7, 24])
def test_the_effective_batch_is_kept_exactly(effective: int) -> None:
    recipe = mebi(120, effective_batch_size=effective).recipe
    assert recipe.batch_size * recipe.gradient_accumulation_steps == effective


def test_a_micro_batch_that_is_given_is_taken() -> None:
    recipe = mebi(120, batch_size=3, effective_batch_size=12).recipe
    assert (recipe.batch_size, recipe.gradient_accumulation_steps) == (3, 4)


def test_the_best_of_several_precisions_is_taken() -> None:
    plan = mebi(120, precision=("fp32", "bf16"))
    alone = [mebi(120, precision=name) for name in ("fp32", "bf16")]
    assert ms_per_sample(plan) == min(map(ms_per_sample, alone))


@pytest.mark.parametrize(("gpu", "name"), [("t4", "fp16-mixed"), (CARD, "bf16-mixed")])
def test_the_precision_follows_from_the_card(gpu: str, name: str) -> None:
    vram = vram_bytes(200, gpu)
    assert mebi(0, gpu=gpu, vram=vram, precision="auto").recipe.precision == name


def test_a_model_on_meta_gets_the_same_plan() -> None:
    plan = budgetfit.plan(
        Mebi(6).to("meta"),
        vram_bytes(120),
        gpu=CARD,
        headroom=0,
        batch=SAMPLE_OF_MEBI,
        precision="fp32",
    )
    assert plan.estimate == mebi(120).estimate
    assert "on meta" in plan.model.source


def test_without_a_batch_one_is_made() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    plan = budgetfit.plan(model, gpu=CARD, batch_size=2)
    assert list(plan.model.batch.values()) == [((2, 16), "float32")]
    assert any("there is no loss" in text for text in plan.estimate.notes)


def test_a_function_may_make_the_optimizer() -> None:
    plan = mebi(120, optimizer=torch.optim.SGD, batch_size=1)
    adamw = mebi(120, batch_size=1)
    assert plan.recipe.optimizer == "torch.optim.sgd.SGD"
    # AdamW keeps two moments of each of the 6 weights of one MiB
    saved = adamw.estimate.at_peak_bytes["optimizer_state"]
    assert saved - plan.estimate.at_peak_bytes.get("optimizer_state", 0) >= 12 * MIB


def test_limit_and_card_are_where_they_were_said_to_be() -> None:
    total = find_gpu(CARD).total_bytes
    alone = mebi(0, vram=None, batch_size=1).budget
    limited = mebi(0, vram="2GB", batch_size=1).budget
    unnamed = mebi(0, vram="2GB", gpu=None, batch_size=1)
    assert alone.total_bytes == total
    assert limited.total_bytes == unnamed.budget.total_bytes == 2 * 10**9
    assert limited.context_bytes == alone.context_bytes
    assert any("no card named" in text for text in unnamed.warnings)


def test_a_limit_above_the_card_is_the_card_and_said_so() -> None:
    plan = mebi(0, vram="48GB", batch_size=1)
    assert plan.budget.total_bytes == find_gpu(CARD).total_bytes
    assert any("less than the 44.70 GiB asked for" in text for text in plan.warnings)


def test_headroom_is_kept_free() -> None:
    tight = mebi(240, headroom="120MiB")
    assert tight.budget.headroom_bytes == 120 * MIB
    assert tight.budget.usable_bytes == 120 * MIB
    assert tight.estimate == mebi(120).estimate


def test_provenance_says_how_the_numbers_came_about() -> None:
    provenance = mebi(120).provenance
    assert provenance["torch"] == torch.__version__
    assert {"transformers", "budgetfit", "solver", "traces", "rounds"} <= set(
        provenance
    )
    assert provenance["asked"]["vram"] == vram_bytes(120)
    assert "checkpointing" not in provenance["asked"]


@pytest.mark.parametrize(
    ("policy", "recorded"),
    [("full", "full"), (("blocks.1", "blocks.3"), "blocks.1,blocks.3")],
    ids=["policy", "names"],
)
def test_checkpointing_that_was_asked_for_is_recorded(
    policy: str | tuple[str, ...], recorded: str
) -> None:
    provenance = mebi(120, checkpointing=policy).provenance
    assert provenance["asked"]["checkpointing"] == recorded


@pytest.mark.parametrize(
    ("mib", "options", "advice"),
    [
        (25, {"precision": ("bf16", "fp32")}, "gpu="),
        (60, {"batch_size": 8, "effective_batch_size": 16}, "batch_size=1"),
        (52, {"checkpointing": "none"}, 'checkpointing="auto"'),
        (52, {"checkpointing": "sqrt", "batch_size": 2}, "batch_size=1"),
    ],
)
def test_what_does_not_fit_says_what_is_needed_and_advises_what_fits(
    mib: int, options: dict[str, Any], advice: str
) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_mebi(mib, **options)

    error = caught.value
    assert advice in str(error)
    assert error.usable_bytes == mib * MIB
    assert error.needed_bytes > error.usable_bytes
    name, largest_bytes = error.largest
    assert 0 < largest_bytes < error.needed_bytes
    assert name.replace("_", " ") in str(error)
    assert all(row.text in str(error) for row in error.suggestions[:3])
    of_this_model = {"optimizer", "precision", "batch_size", "checkpointing"}
    for suggestion in error.suggestions:
        if not of_this_model.issuperset(suggestion.arguments):
            continue
        again = budgetfit.estimate(
            Mebi(6),
            suggestion.recipe,  # type: ignore[arg-type]
            gpu=CARD,
            vram=vram_bytes(mib),
            headroom=0,
            batch=SAMPLE_OF_MEBI,
        )
        assert again.fits, suggestion.text
        assert again.reserved_bytes == suggestion.peak_bytes


def test_a_larger_card_takes_the_model_that_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[object] = []
    read = arguments._read_model

    def spy(asked: arguments.Arguments, *args: Any, **options: Any) -> Any:
        reads.append(asked.gpu)
        return read(asked, *args, **options)

    monkeypatch.setattr(arguments, "_read_model", spy)
    with pytest.raises(DoesNotFitError, match="gpu="):
        plan_mebi(15)
    assert set(reads) == {CARD}
