"""The report with figures, asked for at the command line."""

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi
from tests.reporting.parsed_page import parsed
from tests.reporting.sample_plans import sample_plan

pytest.importorskip("matplotlib")


def test_a_plan_is_printed_and_its_report_written(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    result = run("plan", "gpt2", "--vram", "24GB", "--report", path)
    assert result.exit_code == 0
    printed = str(sample_plan()).replace("pass batch= for", "pass --batch for")
    assert result.stdout == printed + "\n"
    assert parsed(path.read_text(encoding="utf-8")).one("h1").text == "SmolLM2-1.7B"


def test_a_saved_plan_and_a_comparison_have_one(run: Run, tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    sample_plan().save(plan)
    assert run("show", plan, "--report", page).exit_code == 0
    assert "Does it fit?" in page.read_text(encoding="utf-8")
    result = run("compare", "gpt2", "--gpus", "t4,l4", "--report", page)
    assert result.exit_code == 0
    assert "on each GPU" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--report", "--snapshot"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    run: Run, api: FakeApi, tmp_path: Path, option: str
) -> None:
    result = run("plan", "gpt2", option, tmp_path / "no" / "plan.html")
    assert result.exit_code == 2
    assert "Cannot write" in result.stderr
    assert (result.stdout, api.calls) == ("", [])


def test_what_is_missing_is_said_before_the_work(
    run: Run, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("plan", "gpt2", "--report", tmp_path / "plan.html")
    assert result.exit_code == 2
    assert "pip install 'budgetfit[report]'" in result.stderr
    assert (result.stdout, api.calls) == ("", [])


def test_a_report_with_the_ending_of_another_format_is_refused(
    run: Run, api: FakeApi, tmp_path: Path
) -> None:
    path = tmp_path / "plan.pdf"
    result = run("plan", "gpt2", "--report", path)
    assert result.exit_code == 2
    assert "Write --report plan.html" in " ".join(result.stderr.split())
    assert not path.exists()
    assert not api.calls
