"""What others published: some rows of each kind, within what they are allowed."""

import dataclasses
import re

import pytest
import torch

from tests.accuracy.published import context_ranges, several_gpus
from tests.accuracy.published.predict import Prediction, predict, predict_with_sentence
from tests.accuracy.published.programs import LITGPT, program
from tests.accuracy.published.report import page
from tests.accuracy.published.rows import Row, no_prediction, rows

BY_NAME = {row.name: row for row in rows()}


def test_every_row_has_a_name_a_source_and_a_number_or_an_out_of_memory() -> None:
    assert len(BY_NAME) == len(rows()) == 161
    for row in rows():
        assert row.source.startswith("https://")
        assert (row.bytes is None) == (row.published is None)
        assert row.footprint in ("allocated", "reserved", "process", "unknown")
        assert 0 < row.within <= 0.15


def test_a_row_is_predicted_or_says_why_not() -> None:
    reasons = {row.name: no_prediction(row) for row in rows()}
    assert sum(reason is None for reason in reasons.values()) == 49
    assert "4 cards" in str(reasons["litgpt-config-hub-002"])
    assert "4-bit" in str(reasons["litgpt-config-hub-003"])
    assert "compile" in str(reasons["torchtune-flags-003"])
    assert "dora is not rebuilt" in str(reasons["peft-metamathqa-030"])


@pytest.mark.parametrize(
    "name",
    [
        "liger-op-001",  # cross entropy: 20 bytes for each logit
        "liger-op-010",
        "litgpt-config-hub-050",  # TinyLlama, every weight trained
        "litgpt-config-hub-047",  # StableLM, LoRA
        "peft-metamathqa-015",  # Llama 3.2 3B, every weight trained
        "hf-bert-large-002",  # bert-large, accumulation
    ],
)
def test_published_numbers_are_predicted_within_what_they_are_allowed(
    name: str,
) -> None:
    found = predict(BY_NAME[name])
    assert found.holds, f"{name}: {found.error:+.2%}"


def test_what_ran_out_of_memory_does_not_fit() -> None:
    found = predict(BY_NAME["litgpt-config-hub-024"])
    assert found.error is None
    assert not found.fits
    assert found.holds


def test_a_miss_comes_with_a_sentence() -> None:
    found, text = predict_with_sentence(BY_NAME["liger-op-007"])
    assert not found.holds
    assert text.startswith("All four rows differ by the bytes of one head's weights")
    # by +0.0% with the workspaces of torch 2.13, by a little else with others'
    assert re.search(r"the prediction is off by [+-]0\.[0-3]%\.$", text)


def test_trained_parameters_are_as_many_as_published() -> None:
    for row in rows():
        if row.trained is None or no_prediction(row) is not None:
            continue
        model = program(row).model
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert count == row.trained, row.label


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("falcon-7b", 7.2), ("gemma-2b", 3.0), ("gemma-7b", 9.3)),
        *(("llama-2-7b", 6.7), ("llama-3-8b", 8.0), ("phi-2", 2.8)),
        *(("phi-3", 3.8), ("stablelm-base-alpha-3b", 3.6), ("tiny-llama", 1.1)),
    ],
)
def test_rebuilt_models_have_their_size(name: str, billions: float) -> None:
    label = f"{name}/lora.yaml"
    row = dataclasses.replace(BY_NAME["litgpt-config-hub-017"], label=label)
    model = program(row).model
    assert name in LITGPT
    count = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert count / 1e9 == pytest.approx(billions, abs=0.1)


def test_published_processes_lie_in_the_range_that_the_others_leave() -> None:
    found = context_ranges.left_out()
    assert sum(row.inside for row in found) / len(found) >= 0.95
    assert len(context_ranges.apart()) == 69


def test_the_page_names_every_row() -> None:
    def made(row: Row) -> Prediction:
        reason = no_prediction(row)
        size = row.bytes or 2
        return Prediction(
            row=row, allocated_bytes=size, reserved_bytes=size, reason=reason
        )

    text = page([(made(row), "") for row in rows()])
    for row in rows():
        assert row.label in text
        assert row.source.split(" ")[0] in text
    assert "161 rows: 46 numbers and 3 verdicts predicted, 112 not." in text


def test_the_rebuilt_llama_has_the_published_parameters() -> None:
    with torch.device("meta"):
        model = several_gpus.Llama()
    count = sum(each.numel() for each in model.parameters())
    assert count == several_gpus.PARAMETERS
