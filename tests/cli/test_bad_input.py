"""Bad input on the real command line: one clear line and the right exit code."""

import json
from pathlib import Path
from typing import Any

import pytest

from budgetfit import DoesNotFitError
from budgetfit.api import plan as api
from budgetfit.cli.error_wording import with_option_names
from tests.cli.real_cli import assert_one_line, process, run, without_cuda


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu rtx4091", "not in the card table. Nearest: rtx-4090"),
        (
            "--vram 24",
            "'24' is not a memory size. Write a number above zero and a unit",
        ),
        ("--gpu t4 --vram 100MB", "leave nothing to plan with"),
        ("--gpu t4 --precision bf17", "Use one of: auto, fp32, tf32, fp16-mixed"),
        ("--gpu t4 --precision bf16", "Tesla T4 has 7.5: it would only be emulated"),
        ("--gpu t4 --precision fp32,bf16-mixed", "Use --precision fp16-mixed"),
        ("--gpu t4 --optimizer adamx", "'adamx' is not an optimizer. Did you mean"),
        ("--gpu t4 --batch-size 0", "batch_size must be a whole number of at least 1"),
        (
            "--gpu t4 --batch-size 3 --effective-batch-size 8",
            "is never changed. The next smaller one that does is 2.",
        ),
        ("--gpu t4 --max-length 99", "max_length"),
        ("--gpu t4 --checkpointing some", "Use one of: auto, none, full, every-2"),
        (
            "--gpu t4 --checkpointing transformer.h.9",
            "Its blocks: transformer.h.0, transformer.h.1",
        ),
        ("--gpu t4 --objective luck", "Use one of: throughput, batch_size, memory"),
        ("--gpu t4 --batch-size 2 --save no/such/folder/plan.json", "Cannot write"),
    ],
)
def test_settings_that_plan_refuses(place: Path, words: str, message: str) -> None:
    result = run("plan", place / "config.json", *words.split())
    assert_one_line(result, 2, message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu rtx4091", "Nearest: rtx-4090"),
        ("--gpu t4 --checkpointing auto", "an estimate takes none. Use plan"),
        ("--gpu t4 --precision fp32,bf16", "is not a precision"),
        ("--gpu t4 --precision bf16-mixed", "it would only be emulated"),
        ("--gpu t4 --batch-size 0", "at least 1"),
        (
            "--gpu t4 --batch-size 4 --effective-batch-size 6",
            "smaller one that does is 3",
        ),
    ],
)
def test_settings_that_estimate_refuses(place: Path, words: str, message: str) -> None:
    result = run("estimate", place / "config.json", *words.split())
    assert_one_line(result, 2, message)


@without_cuda
def test_neither_card_nor_limit_is_told_with_both_spellings(place: Path) -> None:
    result = run("plan", place / "config.json")
    assert_one_line(result, 2, "(--vram 24GB, --gpu rtx-4090)")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("missing.json", "There is no file or folder"),
        ("broken.json", "is not valid JSON: Expecting value at line 1, column 16"),
        ("empty", "has no config.json. Give a folder, a config.json, a hub id"),
        ("factories.py", "needs the name of the function that builds the model"),
        ("factories.py:raises", "raised ValueError: the weights are not here"),
        ("factories.py:Odd", "No batch can be made for Odd"),
        ("factories.py:Odd", "batch=torch.zeros("),
        ("factories.py:frozen", "Check requires_grad"),
    ],
)
def test_models_that_are_none(place: Path, model: str, message: str) -> None:
    result = run("plan", place / model, "--gpu", "t4")
    assert_one_line(result, 2, message)


def test_a_module_that_is_nowhere_is_named() -> None:
    assert_one_line(run("plan", "nowhere_at_all:build", "--gpu", "t4"), 2, "no module")


def test_empty_text_is_no_model() -> None:
    assert_one_line(run("plan", "", "--gpu", "t4"), 2, "A model is expected, not empty")


TOO_MUCH = ("--gpu", "t4", "--vram", "600MB", "--batch-size", 100_000)


def test_what_does_not_fit_is_an_answer_on_stdout_or_one_document(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[DoesNotFitError] = []

    def once(*args: Any, **given: Any) -> None:
        if not found:
            with pytest.raises(DoesNotFitError) as caught:
                plan(*args, **given)
            found.append(caught.value)
        raise found[0]

    plan = api.plan
    monkeypatch.setattr(api, "plan", once)
    words = ("plan", place / "config.json", *TOO_MUCH)
    text, document = run(*words), run(*words, "--json")

    assert len(found) == 1
    assert text.exit_code == document.exit_code == 3
    assert "Does not fit: the lowest peak that was found is " in text.stdout
    assert "Largest part: " in text.stdout
    assert "What would fit:" in text.stdout
    batch_size = found[0].suggestions[0].recipe.batch_size
    assert f"--batch-size {batch_size}: peak " in text.stdout
    assert "Traceback" not in text.output
    error = json.loads(document.stdout)["error"]
    assert error["type"] == "DoesNotFitError"
    assert error["needed_bytes"] > error["usable_bytes"] > 0
    assert error["largest"]["bytes"] > 0
    assert 1 < batch_size == error["suggestions"][0]["recipe"]["batch_size"] < 100_000
    assert error["suggestions"][0]["peak_bytes"] <= error["usable_bytes"]


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "config.json", "--gpu", "rtx4091"),
        ("plan", "factories.py:raises", "--gpu", "t4"),
        ("plan", "factories.py:Odd", "--gpu", "t4"),
        ("estimate", "missing.json", "--gpu", "t4"),
        ("layers", "broken.json"),
        ("verify", "missing.json", "--device", "cpu"),
        ("export", "missing.json", "--to", "torch"),
    ],
)
def test_with_json_an_error_is_one_document(
    place: Path, words: tuple[str, ...]
) -> None:
    command, file, *options = words
    result = run(command, place / file, *options, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "InputError"
    assert with_option_names(error["message"]) in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan config.json --bogus", "No such option: --bogus"),
        ("plan config.json --batch-size abc", "Invalid value for '--batch-size'"),
        ("plan", "Missing argument 'MODEL'. Use budgetfit plan --help"),
        ("frobnicate", "No such command 'frobnicate'. Use budgetfit --help"),
        ("cache frobnicate", "No such command 'frobnicate'"),
        ("cache clear --bogus", "No such option: --bogus"),
    ],
)
def test_with_json_a_mistake_of_usage_is_one_document_too(
    words: str, message: str
) -> None:
    result = run(*words.split(), "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "InputError"
    assert message in error["message"]
    assert "Usage: budgetfit" in result.stderr
    plain = run(*words.split())
    assert (plain.exit_code, plain.stdout) == (2, "")


def test_a_model_that_fails_while_it_runs_ends_with_1(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "from torch import nn\n"
        "class Wrong(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.second = nn.Linear(4, 4), nn.Linear(5, 4)\n"
        "    def forward(self, x):\n"
        "        return self.second(self.first(x))\n"
    )
    result = run("plan", f"{file}:Wrong", "--gpu", "t4")
    assert_one_line(result, 1, "cannot run on fake tensors, in 'second' at aten.")


def test_in_a_process_of_its_own_nothing_else_is_printed(place: Path) -> None:
    result = process("plan", "config.json", "--gpu", "rtx4091", cwd=place, PATH="")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: 'rtx4091' is not in the card table.")
    assert result.stderr.count("\n") == 1
