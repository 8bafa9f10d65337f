"""``budgetfit explain``: where it reads from, what it prints and ends with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from budgetfit.cli.app import app
from tests.explain import messages


def run(*words: object, given: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, words)], input=given)


def test_a_file_and_standard_input_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "\u00fc oom.txt"
    path.write_text(messages.TORCH_2_1, encoding="utf-8")
    from_file, from_stdin = run(path), run("-", given=messages.TORCH_2_1)
    assert from_file.exit_code == from_stdin.exit_code == 0
    assert from_file.stdout == from_stdin.stdout
    assert from_file.stdout.startswith("WHY  fragmentation\n")
    assert "budgetfit plan MODEL --vram 22.20GiB" in from_file.stdout


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_any_shell_wrote_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "oom.txt"
    path.write_bytes(messages.FULL.encode(encoding) + b"\n")
    assert run(path).stdout.startswith("WHY  the model and its batch")


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(b"\xff\x00\x80" * 50 + messages.FULL.encode() + b"\xc3")
    # The first two bytes look like UTF-16, and then there is no message.
    assert run(path).exit_code in {0, 2}
    path.write_bytes(b"\x80\xff" * 50 + messages.FULL.encode() + b"\xc3")
    assert run(path).exit_code == 0


@pytest.mark.parametrize("encoding", [None, "utf-8", "utf-16"])
def test_of_a_huge_log_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str | None
) -> None:
    monkeypatch.setattr("budgetfit.cli.explain._LONGEST_BYTES", 2000)
    path = tmp_path / "train.log"
    steps = "step\n" * 5000
    path.write_text(f"{messages.TORCH_1_0}\n{steps}{messages.FULL}")
    if encoding is None:
        found = run(path, "--json")
    else:  # on standard input
        found = run("-", "--json", given=path.read_text().encode(encoding))
    result = json.loads(found.stdout)
    assert result["messages"] == 1
    assert result["message"]["total_bytes"] == round(31.37 * 2**30)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no /dev/fd")
def test_a_shell_hands_in_what_a_program_prints() -> None:
    """``explain <(python train.py 2>&1)`` is a pipe, which has no size."""
    end, start = os.pipe()
    os.write(start, f"step 1\n{messages.FULL}\n".encode())
    os.close(start)
    result = run(f"/dev/fd/{end}")
    os.close(end)
    assert result.stdout.startswith("WHY  the model and its batch")


def test_a_closed_standard_input_is_a_mistake_of_usage(tmp_path: Path) -> None:
    errors = tmp_path / "errors.txt"
    code = (
        "import sys; sys.stdin = None; sys.argv[1:] = ['explain', '-']; "
        "from budgetfit.cli.app import main; main()"
    )
    with errors.open("w") as file:
        done = subprocess.run([sys.executable, "-c", code], stderr=file, check=False)
    assert done.returncode == 2
    assert errors.read_text().startswith("Error: Cannot read standard input: it is")


def test_json_has_the_numbers() -> None:
    document = json.loads(run("-", "--json", given=messages.TORCH_2_1).stdout)
    assert document["cause"] == "fragmentation"
    assert document["where"]["phase"] == "unknown"
    assert document["advice"][0]["enough"] is True
    assert {part["name"] for part in document["parts"]} >= {"in tensors", "free"}


def test_a_text_without_a_message_is_a_mistake_of_usage() -> None:
    result = run("-", given="all is well")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "CUDA out of memory. Tried to allocate" in result.stderr


def test_a_file_that_cannot_be_read_is_a_mistake_of_usage(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.txt", "a\0b"):
        result = run(path)
        assert result.exit_code == 2
        assert "Cannot read" in result.stderr
        assert "tee oom.txt" in result.stderr
