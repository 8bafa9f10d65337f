"""What an answer depends on: any one change gives another key, or none."""

import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from budgetfit.calibration.file import FILE_NAME, FOLDER_VARIABLE
from budgetfit.cli import answer_key as keys
from budgetfit.cli.answer_key import answer_key, answers_are_kept
from budgetfit.traces.cache import package_hash as own_sources
from tests.cli.real_cli import CONFIG, run

ASKED: dict[str, Any] = {"gpu": "t4", "batch": None, "loss": None, "lengths": {8: 2}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, a folder of libraries and one of measurements."""
    for name in ("model", "libraries", "measured"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"1")
    record = tmp_path / "libraries" / "transformers-5.0.dist-info"
    record.mkdir()
    os.utime(record, (1, 1))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "libraries")])
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "measured"))
    monkeypatch.setattr(own_sources, "package_hash", lambda: "as they are")
    return tmp_path


def key(place: Path, command: str = "plan", **changes: object) -> str | None:
    asked = {"model": str(place / "model"), **ASKED, **changes}
    with answers_are_kept():
        return answer_key(command, asked)


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "config": lambda at, _: (at / "model/config.json").write_text(
        json.dumps({**CONFIG, "n_layer": 3})
    ),
    "weights": lambda at, _: (at / "model/model.safetensors").write_bytes(b"12"),
    "more weights": lambda at, _: (at / "model/model.safetensors.index.json").touch(),
    "a library": lambda at, _: (at / "libraries/peft-0.19.dist-info").mkdir(),
    "a library, installed again": lambda at, _: os.utime(
        at / "libraries/transformers-5.0.dist-info", (2, 2)
    ),
    "a library of another version": lambda at, _: (
        at / "libraries/transformers-5.0.dist-info"
    ).rename(at / "libraries/transformers-5.1.dist-info"),
    "a module that hides another": lambda at, _: (at / "libraries/peft.py").touch(),
    "an editable library": lambda at, _: (at / "libraries/mine.pth").touch(),
    "the search path": lambda _, patch: patch.setattr(sys, "path", sys.path[:-1]),
    "a variable": lambda _, patch: patch.setenv("PYTORCH_ALLOC_CONF", "x:1"),
    "an unknown variable": lambda _, patch: patch.setenv("NOBODY_KNOWS_IT", "1"),
    "a measurement": lambda at, _: (at / "measured" / FILE_NAME).write_text("{}"),
    "the machine": lambda _, patch: patch.setattr(platform, "node", lambda: "other"),
    "Python": lambda _, patch: patch.setattr(sys, "version", "4.0"),
    "our own sources": lambda _, patch: patch.setattr(
        own_sources, "package_hash", lambda: "other"
    ),
    "a driver": lambda at, patch: patch.setattr(
        keys, "_DEVICES", ((str(at / "model"), "config*"),)
    ),
}
NO_CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "another terminal": lambda _, patch: patch.setenv("TERM", "dumb"),
    "another login": lambda _, patch: patch.setenv("SSH_CONNECTION", "1 2 3 4"),
    "a plan that was saved here": lambda at, _: (at / "model/plan.json").touch(),
    "compiled files": lambda at, _: (at / "libraries/__pycache__").mkdir(),
    "data": lambda at, _: (at / "libraries/notes.txt").touch(),
}


@pytest.mark.parametrize("change", [*CHANGES, *NO_CHANGES])
def test_any_single_change_that_matters_gives_another_key(
    place: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before = key(place)
    assert before is not None
    assert key(place) == before
    {**CHANGES, **NO_CHANGES}[change](place, monkeypatch)
    after = key(place)
    assert after is not None
    assert (after != before) == (change in CHANGES)


@pytest.mark.parametrize(
    "changes",
    [{"gpu": "l4"}, {"lengths": {8: 3}}, {"batch_size": 1}, {"lengths": None}],
)
def test_other_options_give_another_key(
    place: Path, changes: dict[str, object]
) -> None:
    assert key(place, **changes) not in (key(place), None)


def test_other_commands_and_models_give_another_key(place: Path) -> None:
    (place / "model" / "other.json").write_text(json.dumps(CONFIG))
    found = {
        key(place),
        key(place, "estimate"),
        key(place, model=str(place / "model" / "config.json")),
        key(place, model=str(place / "model" / "other.json")),
    }
    assert len(found) == 4
    assert None not in found


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "package.module:build"},
        {"model": "model.py:build"},
        {"model": "/no/such/folder"},
        {"batch": "file.py:batch"},
        {"loss": "file.py:loss"},
        {"trust_remote_code": True},
    ],
)
def test_code_of_the_user_and_missing_files_have_no_key(
    place: Path, changes: dict[str, object]
) -> None:
    assert key(place, **changes) is None


def test_a_backbone_that_is_looked_up_on_the_hub_has_no_key(place: Path) -> None:
    nested = {**CONFIG, "parts": [{"vision": {"backbone": "resnet50"}}]}
    (place / "model" / "config.json").write_text(json.dumps(nested))
    assert key(place) is None


def test_only_a_process_of_its_own_has_keys(place: Path) -> None:
    assert answer_key("plan", {"model": str(place / "model"), **ASKED}) is None


def test_variables_that_libraries_set_meanwhile_do_not_count(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"model": str(place / "model"), **ASKED}
    with answers_are_kept():
        before = answer_key("plan", asked)
        monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
        monkeypatch.setattr(sys, "path", [*sys.path, "/another"])
        assert answer_key("plan", asked) == before is not None


def test_a_hub_id_is_its_commit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
    folder = place / "hub" / "models--org--name"
    for commit in ("a" * 40, "b" * 40):
        (folder / "snapshots" / commit).mkdir(parents=True)
        file = folder / "snapshots" / commit / "config.json"
        file.write_text(json.dumps(CONFIG))
    (folder / "refs").mkdir()
    assert key(place, model="org/name") is None
    found = []
    for commit in ("a" * 40, "b" * 40, "a" * 40):
        (folder / "refs" / "main").write_text(commit)
        found.append(key(place, model="org/name"))
    assert found[0] == found[2] != found[1]
    assert None not in found


_opened: set[str] | None = None


def _note_opened(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.add(str(args[0]))


@pytest.fixture
def opened() -> Iterator[set[str]]:
    """The files that Python opens meanwhile."""
    global _opened  # noqa: PLW0603 - an audit hook stays for good
    sys.addaudithook(_note_opened)
    _opened = set()
    yield _opened
    _opened = None


def test_nothing_else_of_a_folder_is_read(tmp_path: Path, opened: set[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("generation_config", "preprocessor_config", "tokenizer_config"):
        (tmp_path / f"{name}.json").write_text("{}")
    opened.clear()
    result = run("estimate", tmp_path, "--gpu", "t4", "--method", "lora")
    assert result.exit_code == 0, result.output
    read = {Path(name).name for name in opened if str(tmp_path) in name}
    assert read == {"config.json", "model.safetensors.index.json"}
