"""The command line as its own process: what it imports, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from budgetfit.cli import main
from budgetfit.cli_answers import ignore_odd_width

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "scipy")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, in the repository."""
    return subprocess.run(  # noqa: S603 - our own interpreter and code
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [["--help"], ["plan", "--help"], ["gpus"], ["gpus", "--json"], ["cache", "info"]],
)
def test_what_needs_no_torch_does_not_import_it(words: list[str]) -> None:
    result = python(
        f"""
import sys
sys.argv = ["budgetfit", *{words!r}]
try:
    import budgetfit.__main__
    budgetfit.__main__.main()
finally:
    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    )

    assert result.returncode == 0
    assert result.stdout
    assert result.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "org/name", "--gpu", "rtx4091"],
        ["plan", "org/name", "--gpu", "mi300x"],
        ["plan", "org/name", "--vram", "24"],
        ["plan", "org/name", "--gpu", "t4", "--headroom", "lots"],
        ["plan", "org/name", "--gpu", "t4", "--precision", "bf17"],
        ["plan", "org/name", "--gpu", "t4", "--precision", "bf16"],
        ["plan", "org/name", "--vram", "24GB", "--precision", "fp32,bf17"],
        ["plan", "org/name", "--gpu", "t4", "--objective", "luck"],
        ["plan", "org/name", "--gpu", "t4", "--batch-size", "0"],
        ["plan", "no/such/config.json", "--gpu", "t4"],
        ["plan", "no_such.py:build", "--gpu", "t4"],
        ["plan", "org/name", "--fsdp"],
        ["estimate", "org/name", "--gpu", "rtx4091"],
        ["estimate", "org/name", "--gpu", "t4", "--precision", "fp32,bf16"],
        ["compare", "org/name", "--gpus", "t4,rtx4091"],
        ["compare", "org/name", "--gpus", "t4", "--objective", "luck"],
        ["layers", "no/such/config.json"],
        ["verify", "no_such.json"],
        ["export", "no_such.json", "--to", "torch"],
    ],
)
def test_what_was_mistyped_is_told_before_torch_is_imported(words: list[str]) -> None:
    result = python(
        f"""
import sys
sys.argv = ["budgetfit", *{words!r}]
import budgetfit.__main__
try:
    budgetfit.__main__.main()
except SystemExit as ended:
    print(ended.code, [name for name in {HEAVY!r} if name in sys.modules])
"""
    )

    assert result.stdout == "2 []\n", result
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("columns", ["0", "1", "-5", "", "9" * 5000, "\u00b2"])
def test_a_width_of_no_use_hides_no_mistake_of_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "argv", ["budgetfit", "explain"])
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "Missing argument 'OOM.txt'" in capsys.readouterr().err


def test_a_width_that_can_be_read_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    ignore_odd_width()
    assert os.environ["COLUMNS"] == "100"


def test_loading_a_plan_does_not_import_torch() -> None:
    result = python(
        """
import sys
import budgetfit
budgetfit.Plan, budgetfit.Recipe, budgetfit.InputError
assert "torch" not in sys.modules
"""
    )

    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
def test_a_reader_that_leaves_early_sees_no_traceback() -> None:
    command = f"{sys.executable} -m budgetfit gpus | head -1"
    result = subprocess.run(  # noqa: S602 - a pipe is what is tested
        command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert "sold as" in result.stdout
    assert "Traceback" not in result.stderr


def test_an_ascii_terminal_can_show_every_table() -> None:
    result = python(
        "import sys; sys.argv = ['budgetfit', 'gpus']\n"
        "from budgetfit.cli import main; main()",
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
