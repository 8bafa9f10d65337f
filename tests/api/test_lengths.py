"""``lengths=``: all of them are planned for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import budgetfit
from budgetfit import InputError
from budgetfit.api.compare import compare
from budgetfit.planning.alternatives.compare_gpus import lengths_warning
from tests.models import EXAMPLES, LENGTH, VOCABULARY

pytestmark = pytest.mark.usefixtures("kept_traces")
LENGTHS = {8: 3, 24: 1}  # 48 tokens in 4 x 24 positions: half is padding


def estimated(**options: Any) -> budgetfit.Estimate:
    return budgetfit.estimate(EXAMPLES["llama"].model(), gpu="l4", **options)


def test_the_longest_sample_is_planned_for() -> None:
    plan = budgetfit.plan(
        EXAMPLES["llama"].model(),
        gpu="l4",
        lengths=LENGTHS,
        checkpointing="none",
        batch_size=2,
    )
    assert plan.model.batch["input_ids"][0] == (2, 24)
    assert plan.provenance["asked"]["max_length"] == 24
    text = " ".join(plan.warnings)
    assert "planned for samples of 8 to 24 tokens (the mean of 4 is 12.0)" in text
    over = plan.varying_lengths
    assert over is not None
    assert (over.shortest, over.longest) == (8, 24)


def test_an_estimate_notes_it_too() -> None:
    found = estimated(lengths=[8, 24], max_length=16)
    assert any("1 of 2 samples are longer than max_length 16" in n for n in found.notes)


def test_a_batch_of_ones_own_has_to_hold_the_longest_sample() -> None:
    batch = EXAMPLES["llama"].batch
    assert estimated(lengths=[4, LENGTH], batch=batch).fits
    with pytest.raises(InputError, match=r"pad the example batch to 17"):
        estimated(lengths=[4, LENGTH + 1], batch=batch)
    ids = torch.randint(VOCABULARY, (2, LENGTH + 4))
    longer = {"input_ids": ids, "labels": ids}
    assert estimated(lengths=[4, LENGTH], batch=longer).fits


def test_models_without_sequences_have_no_lengths() -> None:
    with pytest.raises(InputError, match="holds no sequence whose length"):
        budgetfit.plan(EXAMPLES["vit"].model(), gpu="l4", lengths=[512])


def test_samples_beyond_the_models_positions_are_told_how_to_cut_them() -> None:
    with pytest.raises(
        InputError,
        match=r"max_length 5000, or the longest of lengths=, is too long: .* cut",
    ):
        budgetfit.plan(EXAMPLES["gpt2"].model(), gpu="l4", lengths=[16, 5000])


@pytest.mark.parametrize("wrong", ["512", 1024])
def test_one_length_is_no_list_of_them(wrong: object) -> None:
    with pytest.raises(InputError, match=r"lengths must be a list of lengths"):
        estimated(lengths=wrong)


@pytest.mark.parametrize("update", [256, None])
def test_a_comparison_judges_all_lengths_as_a_plan(
    config: Path, update: int | None
) -> None:
    given: dict[str, Any] = {
        "batch_size": 256,
        "effective_batch_size": update,
        "precision": "fp32",
        "checkpointing": "none",
    }
    (varying,), _ = compare(str(config), ["t4"], lengths={8: 5, 32: 1}, **given)
    planned = budgetfit.plan(str(config), gpu="t4", lengths={8: 5, 32: 1}, **given)
    assert planned.varying_lengths is not None
    assert varying.estimate is not None
    for name in ("recipe", "reserved_bytes", "process_bytes", "fits"):
        assert getattr(varying.estimate, name) == getattr(planned.estimate, name)
    assert varying.budget == planned.budget
    needs = replace(
        planned.varying_lengths, measure="longest first", pad_to_multiple_of=64
    )
    text = "which fit with longest first and padding to multiples of 64. Use"
    assert text in lengths_warning(needs)
    (equal,), _ = compare(str(config), ["t4"], lengths={32: 5}, **given)
    assert equal.estimate is not None
    assert varying.estimate.reserved_bytes > equal.estimate.reserved_bytes
    rate = planned.varying_lengths.samples_per_s
    assert varying.estimate.data_samples_per_s == pytest.approx(rate)
    said = "are over all sizes of the samples"
    assert [said in text for text in varying.warnings].count(True) == 1
    assert not any(said in text for text in equal.warnings)
