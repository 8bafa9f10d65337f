"""The page of what fits says what was answered, and no answer contradicts another."""

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest

from budgetfit.gpus.table import find_gpu
from docs import what_fits

ANSWERS = what_fits.answers()


def of(model: str, method: str, gpu: str) -> dict[str, Any]:
    (found,) = [
        answer
        for answer in ANSWERS
        if (answer["model"], answer["method"], answer["gpu"]) == (model, method, gpu)
    ]
    return found


def test_the_page_is_what_the_answers_make() -> None:
    assert what_fits.PAGE.read_text() == what_fits.page(ANSWERS)


def test_every_cell_is_answered_once() -> None:
    for model, method, gpu in itertools.product(
        what_fits.MODELS, what_fits.METHODS, what_fits.GPUS
    ):
        answer = of(model.name, method, gpu)
        words = shlex.split(answer["command"])
        assert words[1] == model.folder
        assert {method, ",".join(what_fits.GPUS)} <= set(words)
        assert (what_fits.ROOT / words[1] / "config.json").is_file()


def test_an_answer_agrees_with_its_own_numbers() -> None:
    for answer in ANSWERS:
        assert answer["fits"] is (answer["reserved_bytes"] <= answer["usable_bytes"])
        assert answer["usable_bytes"] < find_gpu(answer["gpu"]).total_bytes
        batch = answer["batch_size"] * answer["gradient_accumulation_steps"]
        assert batch == what_fits.EFFECTIVE_BATCH_SIZE
        assert sum(answer["modes"].values()) <= answer["blocks"]


def test_what_fits_in_full_fits_with_adapters_and_on_larger_cards() -> None:
    for model in what_fits.MODELS:
        for gpu in what_fits.GPUS:
            fit = [
                of(model.name, each, gpu)["fits"] for each in ("full", "lora", "qlora")
            ]
            assert fit == sorted(fit)
        for method in what_fits.METHODS:
            small, large = ("rtx-3060", "t4", "rtx-4090"), ("a100-80gb", "h100-80gb")
            if any(of(model.name, method, gpu)["fits"] for gpu in small):
                assert all(of(model.name, method, gpu)["fits"] for gpu in large)


def test_a_command_is_run_once_and_its_answer_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = what_fits.Model("examples/configs/gpt2", "openai-community/gpt2")
    monkeypatch.setattr(what_fits, "ANSWERS", tmp_path / "answers.jsonl")
    monkeypatch.setattr(what_fits, "MODELS", (model,))
    monkeypatch.setattr(what_fits, "GPUS", ("t4",))
    monkeypatch.setattr(what_fits, "TOKENS", 64)
    what_fits.ask(model, "full")
    (answer,) = what_fits.answers()
    assert answer["fits"]
    assert answer["command"].endswith("--max-length 64 --effective-batch-size 16")
    assert "| gpt2" in what_fits.page([answer])

    def again(*_: object, **__: object) -> None:
        pytest.fail("it was asked again")

    monkeypatch.setattr(what_fits.subprocess, "run", again)
    what_fits.ask(model, "full")


def test_a_command_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = what_fits.Model("examples/configs/no-such-model", "")
    monkeypatch.setattr(what_fits, "ANSWERS", tmp_path / "answers.jsonl")
    monkeypatch.setattr(what_fits, "GPUS", ("t4",))
    with pytest.raises(RuntimeError, match="no-such-model"):
        what_fits.ask(model, "full")
    assert not (tmp_path / "answers.jsonl").exists()
