"""``budgetfit cache``: what it says, and that it needs neither torch nor a cache."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from budgetfit.cli.app import app


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["cache", *words])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace and an answer of 1 MiB together, and a file of somebody else's."""
    monkeypatch.setenv("BUDGETFIT_CACHE", str(tmp_path))
    for name in (f"{'a' * 64}.npz", f"{'b' * 64}.json.gz"):
        (tmp_path / name).write_bytes(bytes(2**19))
    (tmp_path / "mine.npz").write_bytes(b"mine")
    return tmp_path


def test_info_tells_folder_files_and_bytes(folder: Path) -> None:
    lines = run("info").stdout.splitlines()
    assert lines == [f"folder  {folder}", "files   2", "size    1 MiB of 512 MiB"]
    assert json.loads(run("info", "--json").stdout) == {
        "folder": str(folder),
        "files": 2,
        "bytes": 2**20,
        "limit_bytes": 512 * 2**20,
    }


def test_clear_removes_both_and_says_how_many(folder: Path) -> None:
    assert run("clear").stdout == "removed 2 files, 1 MiB\n"
    assert [path.name for path in folder.iterdir()] == ["mine.npz"]
    assert json.loads(run("clear", "--json").stdout) == {
        "removed_files": 0,
        "removed_bytes": 0,
    }


def test_a_cache_that_is_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUDGETFIT_CACHE", "off")
    result = run("info")
    assert result.exit_code == 0
    assert "folder  off: BUDGETFIT_CACHE" in result.stdout
    assert json.loads(run("info", "--json").stdout)["folder"] is None
    assert run("clear").stdout.startswith("removed 0 files")


def test_the_command_alone_lists_what_there_is() -> None:
    text = run("--help").stdout
    assert "clear" in text
    assert "info" in text


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "budgetfit.traces.cache.folder", None)
    result = run("clear")
    assert result.exit_code == 1
    assert "--traceback" in result.output
