"""``budgetfit doctor``: what it prints, ends with, and survives."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from budgetfit.cli.app import app
from budgetfit.doctor import checks, gather
from budgetfit.doctor.facts import Machine
from tests.doctor import machines
from tests.processes import python


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The machine that is found; put another one in its place."""
    found = [machines.GOOD]
    monkeypatch.setattr(checks, "gather", lambda: found[0])
    return found


def test_without_problems_it_says_so_and_ends_with_0(machine: list[Machine]) -> None:
    assert machine
    result = run()
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split()[:3] == ["ok", "torch", "2.13.0+cu130;"]
    assert result.stdout.endswith("\nNo problems.\n")
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_problem_comes_with_its_command_and_code_1(machine: list[Machine]) -> None:
    machine[0] = replace(
        machines.GOOD, environment={"PYTORCH_ALLOC_CONF": "expandable_segment:True"}
    )
    result = run()
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("problem"))
    assert "unset PYTORCH_ALLOC_CONF" in "\n".join(lines[at : at + 6])
    assert lines[-1] == "1 problem."


def test_json_has_every_finding(machine: list[Machine]) -> None:
    machine[0] = replace(machines.GOOD, torch=machines.CPU_TORCH)
    result = run("--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["problems"] == 1
    [problem] = [f for f in document["findings"] if f["verdict"] == "problem"]
    assert problem["topic"] == "CUDA"
    assert problem["commands"][0].startswith("pip install")


def test_a_card_can_be_named(machine: list[Machine]) -> None:
    assert machine
    assert "H100" in run("--gpu", "h100-80gb").stdout
    wrong = run("--gpu", "rtx-9999")
    assert wrong.exit_code == 2
    assert "Nearest" in wrong.stderr


def test_this_machine_is_looked_at_whatever_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing, with a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gather, "_TRIED", ("torch",))
    result = run()
    assert result.exit_code == 1
    assert "libcudart.so.13" in result.stdout
    assert "Traceback" not in result.output


def test_the_check_up_itself_imports_no_torch() -> None:
    code = "import sys, budgetfit.doctor.checks; print('torch' in sys.modules)"
    done = python("-c", code, check=True)
    assert done.stdout == "False\n"
