"""Plan files that are damaged, missing or of another model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.real_cli import assert_one_line, run, without_cuda


@pytest.fixture(scope="module")
def saved(place: Path) -> dict[str, Any]:
    """The document of a plan, which is also in plan.json."""
    path = place / "plan.json"
    result = run(
        *("plan", place / "config.json", "--gpu", "t4", "--batch-size", 2),
        *("--checkpointing", "full", "--save", path),
    )
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def changed(document: dict[str, Any], place: Path, **fields: Any) -> Path:
    """Write the plan with other fields."""
    path = place / "changed.json"
    path.write_text(json.dumps({**document, **fields}))
    return path


Change = dict[str, Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "not a plan of this version. Save it again: budgetfit plan"),
        ({"budget": None}, "damaged at 'budget"),
        ({"provenance": [1]}, "damaged at 'provenance'"),
        ({"unheard_of": 1}, "damaged at 'unheard_of'"),
        (
            lambda plan: plan["recipe"].pop("batch_size"),
            "damaged at 'recipe.batch_size'",
        ),
        (lambda plan: plan["recipe"].update(batch_size="two"), "valid integer"),
        (lambda plan: plan["recipe"].update(batch_size=0), "at least 1"),
        (
            lambda plan: plan["recipe"].update(gradient_accumulation_steps=0),
            "gradient_accumulation_steps must be a whole number of at least 1",
        ),
        (
            lambda plan: plan["recipe"].update(optimizer="adamz"),
            "'recipe.optimizer': all numbers of the plan are those of",
        ),
        (
            lambda plan: plan["recipe"]["segments"].append(
                plan["recipe"]["segments"][0]
            ),
            "is in more than one segment. Name each once",
        ),
        (
            lambda plan: plan["recipe"].update(precision="fp7"),
            "'fp7' is not a precision",
        ),
        (
            lambda plan: plan["recipe"].update(
                segments=[{"blocks": ["transformer.h.9"], "mode": "recompute"}]
            ),
            "at 'recipe.segments': the planned model has no block 'transformer.h.9'",
        ),
        (
            lambda plan: plan["model"].update(parameter_count=7),
            "28,032 parameters, not 7. Plan again for this model",
        ),
        ({"provenance": {"asked": [1]}}, "damaged at 'provenance.asked'"),
        ({"provenance": {}}, "The plan does not say which model it is for"),
    ],
)
def test_plans_that_verify_refuses(
    saved: dict[str, Any],
    place: Path,
    change: Change | Callable[[dict[str, Any]], object],
    message: str,
) -> None:
    document = json.loads(json.dumps(saved))
    if callable(change):
        change(document)
        path = changed(document, place)
    else:
        path = changed(document, place, **change)
    result = run("verify", path, "--device", "cpu")
    assert_one_line(result, 2, message)


@pytest.mark.parametrize("command", ["verify", "export"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Cannot read the plan"),
        (b"\xff\xfe\x00", "Cannot read the plan"),
        (b'{"format": 1, "rec', "This is not a saved plan: line 1 is not JSON"),
        (b"\n# A readme", "This is not a saved plan: line 2 is not JSON. Save it"),
        (b"[]", "not a plan of this version"),
        (b"", "This is not a saved plan: line 1 is not JSON"),
    ],
)
def test_files_that_are_no_plan(
    tmp_path: Path, command: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    words = ["--to", "torch"] if command == "export" else ["--device", "cpu"]
    assert_one_line(run(command, path, *words), 2, message)


@without_cuda
def test_verify_without_a_card_says_what_can_be_done(
    saved: dict[str, Any], place: Path
) -> None:
    assert saved
    result = run("verify", place / "plan.json")
    assert_one_line(result, 2, "or say --device cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device tpu", "cannot be verified on"),
        ("--device cpu --steps 2", "whole number of at least 3, got 2"),
        ("--device cpu --model missing.json", "There is no file or folder"),
    ],
)
def test_what_verify_refuses(
    saved: dict[str, Any], place: Path, words: str, message: str
) -> None:
    assert saved
    assert_one_line(run("verify", place / "plan.json", *words.split()), 2, message)


def test_one_process_of_a_machine_says_what_is_wrong(
    saved: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved
    words = ("verify", place / "plan.json", "--device", "tpu")
    for rank, said in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        result = run(*words)
        assert result.exit_code == 2
        assert bool(result.output) is said


def test_verify_refuses_another_model(saved: dict[str, Any], place: Path) -> None:
    assert saved
    result = run(
        *("verify", place / "plan.json", "--device", "cpu"),
        *("--model", f"{place / 'factories.py'}:small"),
    )
    assert_one_line(result, 2, "has no block 'transformer.h.0'. Plan again")
