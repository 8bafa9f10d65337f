"""A saved plan, checked again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, ViTConfig

import budgetfit
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.gpus.table import gpu_from_properties
from budgetfit.inputs.plan_source import planned_arguments
from budgetfit.inputs.planned_again import parse_again
from tests.api.planned import plan_of_config, write_config
from tests.models import LLAMA, alone, llama, sgd
from tests.reporting.sample_plans import sample_plan

pytestmark = pytest.mark.usefixtures("kept_traces")

# What is checked is its memory, however it was chosen.
ONE_RECIPE: dict[str, Any] = {"batch_size": 4, "checkpointing": "full"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"method": "lora", "lora_r": 4, "target_modules": "q_proj", **ONE_RECIPE},
        {"gpu": None, "vram": "2GB", "precision": "fp32", **ONE_RECIPE},
        {"allocator": "expandable_segments:True", "headroom": "500MB", **ONE_RECIPE},
    ],
    ids=["full", "lora", "vram", "allocator"],
)
def test_a_plan_still_takes_what_was_planned(
    config: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    made = plan_of_config(config, **given)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    for plan in (made, loaded):
        found = budgetfit.check(plan)
        assert found.reserved_bytes == made.estimate.reserved_bytes
        assert found.usable_bytes == made.budget.usable_bytes
        assert found.fits


def test_an_optimizer_of_ones_own_is_handed_in_again(
    config: Path, tmp_path: Path
) -> None:
    made = plan_of_config(config, optimizer=sgd, batch_size=8)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"check\(plan, model, optimizer=\.\.\.\)"):
        budgetfit.check(loaded)
    found = budgetfit.check(loaded, optimizer=sgd)
    assert found.reserved_bytes == made.estimate.reserved_bytes


def test_on_a_card_that_is_too_small_it_does_not_fit(config: Path) -> None:
    plan = plan_of_config(config, precision="fp32")
    assert not budgetfit.check(plan, vram="540MB", headroom=0).fits
    assert budgetfit.check(plan, gpu="l4").fits


def test_a_limit_alone_is_one_on_the_planned_card(config: Path) -> None:
    plan = plan_of_config(config, precision="fp32", gpu="a100-40gb", **ONE_RECIPE)

    def gpu(vram: str) -> str:
        return parse_again(plan, planned_arguments(plan), vram=vram).target.gpu.name

    assert gpu("4GB") == "a100-40gb"
    assert gpu("80GB") == "assumed"  # that card has less


def test_the_planned_card_need_not_be_in_the_table(config: Path) -> None:
    name = "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    card = gpu_from_properties(name, 10 * 2**30, (8, 0), 14, 1536)
    plan = plan_of_config(config, gpu="l4", **QUICK)
    limit = replace(plan.budget, total_bytes=card.total_bytes)
    plan = Plan.from_json(plan.changed(gpu=card, budget=limit).to_json())
    found = budgetfit.check(plan)
    assert found.fits
    assert found.usable_bytes is not None
    assert found.usable_bytes < card.total_bytes


def test_host_memory_is_what_was_planned_or_is_given(config: Path) -> None:
    made = plan_of_config(config, host_ram="200GiB", **QUICK)
    (one, *_) = made.model.blocks
    recipe = replace(made.recipe, segments=(Segment((one,), mode="offload"),))
    plan = made.changed(recipe=recipe)

    def limit(plan: Plan, **given: Any) -> int | None:
        asked = planned_arguments(plan)
        return parse_again(plan, asked, **given).budget.host_ram_bytes

    assert limit(plan) == limit(plan, gpu="l4") == 200 * 2**30
    assert limit(plan, host_ram="1GiB") == 2**30
    assumed = replace(plan.budget, host_ram_source="assumed")
    assert limit(plan.changed(budget=assumed), gpu="t4") == 8 * 2**30
    # A saved limit is that of one rank.
    several = replace(
        recipe, parallelism=Parallelism(engine="ddp", gpus=8, gpus_per_node=4)
    )
    share = replace(plan.budget, host_ram_bytes=50 * 2**30)
    assert limit(plan.changed(recipe=several, budget=share)) == 200 * 2**30

    found = budgetfit.check(plan)
    assert found.fits
    assert found.host_bytes > 1
    least = budgetfit.check(plan, host_ram=found.host_bytes - 1)
    assert least.fits is False
    (note,) = (text for text in least.notes if "host memory" in text)
    assert "are needed, of" in note
    assert "host_ram=" in note


def test_a_card_that_cannot_run_the_precision_is_refused(config: Path) -> None:
    plan = plan_of_config(config, precision="bf16-mixed")
    with pytest.raises(InputError, match=r"bf16-mixed.*8\.0.*plan for this card anew"):
        budgetfit.check(plan, gpu="t4")


def test_another_model_is_refused(config: Path, tmp_path: Path) -> None:
    plan = plan_of_config(config)
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
    asked = {"batch": batch, "batch_size": 2, "checkpointing": "none"}
    made = alone(budgetfit.plan(model, gpu="rtx-4090", **asked))
    assert budgetfit.check(made).fits
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(InputError, match="does not say which model"):
        budgetfit.check(loaded)
    with pytest.raises(InputError, match=r"made for a batch of.* check\(plan, model,"):
        budgetfit.check(loaded, model)
    found = budgetfit.check(loaded, model, batch=batch)
    assert found.reserved_bytes == made.estimate.reserved_bytes


def test_a_plan_of_code_says_how_to_hand_that_code_in() -> None:
    plan = sample_plan(provenance={"asked": {"model": "my model.py:build"}})
    with pytest.raises(InputError, match=r"built by .*--model 'my model\.py:build'"):
        planned_arguments(plan)


LENGTHS = {8: 5, 24: 2, 32: 1}
SIZES = {16: 3, 32: 1, (16, 48): 1}
# One recipe: what is checked is its memory.
QUICK: dict[str, Any] = {
    "max_length": None,
    "batch_size": 4,
    "effective_batch_size": 4,
    "precision": "bf16-mixed",
    "checkpointing": "none",
}


@pytest.fixture(scope="module")
def over_lengths(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    config = write_config(tmp_path_factory.mktemp("config"))
    return plan_of_config(config, lengths=LENGTHS, **QUICK)


@pytest.fixture(scope="module")
def over_images(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("images")
    ViTConfig(
        image_size=48,
        patch_size=8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        architectures=["ViTForImageClassification"],
    ).save_pretrained(folder)
    return plan_of_config(folder, image_sizes=SIZES, **QUICK)


def saved_by_an_earlier_version(plan: Plan) -> Plan:
    """Return a plan whose file does not say the sizes of samples."""
    document = json.loads(plan.to_json())
    for name in ("lengths", "image_sizes"):
        document["provenance"]["asked"].pop(name, None)
    return Plan.from_json(json.dumps(document))


def test_lengths_are_checked_and_verified_again(over_lengths: Plan) -> None:
    plan = Plan.from_json(over_lengths.to_json())
    assert plan.provenance["asked"]["lengths"] == {"8": 5, "24": 2, "32": 1}
    assert "attention_mask" in plan.model.batch
    found = budgetfit.check(plan)
    assert found.reserved_bytes == over_lengths.estimate.reserved_bytes
    assert any("updates of random sizes" in note for note in found.notes)
    check = budgetfit.verify(plan, device="cpu", steps=3)
    assert check.passed


def test_image_sizes_are_checked_again(over_images: Plan) -> None:
    found = budgetfit.check(Plan.from_json(over_images.to_json()))
    assert found.reserved_bytes == over_images.estimate.reserved_bytes
    assert any("updates of random sizes" in note for note in found.notes)


def test_padded_lengths_are_checked_as_padded(config: Path) -> None:
    made = plan_of_config(config, lengths={8: 1, 80: 1, 96: 1}, **QUICK)
    assert made.varying_lengths is not None
    padded = replace(made.varying_lengths, pad_to_multiple_of=64)
    again = replace(made, varying_lengths=padded)
    parsed = parse_again(again, planned_arguments(again))
    lengths = parsed.workload.lengths
    assert lengths is not None
    drawn = {size for row in lengths.draw(1, 2, 50, seed=0) for size in row}
    assert drawn == {64, 96}


def test_of_sizes_that_the_file_does_not_say_the_plans_figure_is_the_least(
    over_lengths: Plan, over_images: Plan
) -> None:
    for made in (over_lengths, over_images):
        found = budgetfit.check(saved_by_an_earlier_version(made))
        assert found.reserved_bytes == made.estimate.reserved_bytes
        assert found.process_bytes == made.estimate.process_bytes
        (note,) = [each for each in found.notes if "other sizes" in each]
        assert "does not say" in note


def test_sizes_in_a_damaged_file_are_refused(config: Path) -> None:
    document = json.loads(plan_of_config(config, **QUICK).to_json())
    for name, value in (
        ("lengths", {}),
        ("lengths", {"8": 0}),
        ("lengths", {"-8": 1}),
        ("lengths", [8]),
        ("image_sizes", {"8": 1}),
        ("image_sizes", {"8x8": True}),
    ):
        document["provenance"]["asked"] = {name: value}
        with pytest.raises(InputError, match=rf"provenance\.asked\.{name}"):
            Plan.from_json(json.dumps(document))
