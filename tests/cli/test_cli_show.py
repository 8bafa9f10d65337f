"""``budgetfit show``: a saved plan as it was printed, without torch."""

import json
from pathlib import Path

import pytest

from budgetfit.core.plan import Plan
from budgetfit.errors import InputError
from tests.cli.conftest import Run
from tests.processes import python
from tests.reporting.sample_plans import sample_plan


def test_a_saved_plan_is_shown_as_it_was_printed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned = run("plan", "m", "--save", path)
    shown = run("show", path)
    assert shown.exit_code == 0
    assert shown.stdout == planned.stdout
    assert "1.0 h" in run("show", path, "--samples", 36_000).stdout
    assert json.loads(run("show", path, "--json").stdout)["estimate"]["fits"]


def test_a_document_with_hours_is_a_plan_too(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(run("plan", "m", "--json", "--samples", 36_000).stdout)
    assert Plan.load(path) == sample_plan()


def test_what_is_no_plan_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("[]")
    result = run("show", path)
    assert result.exit_code == 2
    assert "not a plan of this version" in result.stderr


def test_torch_is_not_imported_for_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    code = (
        "import sys; from budgetfit.cli.app import app\n"
        f"try: app(['show', {str(path)!r}])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "RECOMMENDED" in done.stdout


@pytest.mark.parametrize("length", ["11264", True, 0, 1.5])
def test_a_length_that_is_none_is_named(length: object) -> None:
    document = json.loads(sample_plan().to_json())
    document["provenance"]["longest_length"] = length
    with pytest.raises(InputError, match=r"provenance.longest_length|below zero"):
        Plan.from_json(json.dumps(document))


def test_the_longest_context_is_the_first_thing_that_is_said(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    provenance = {"longest_length": 11_264, "longest_looked_at": 131_072}
    sample_plan(provenance=provenance).save(path)
    answer = run("show", path).stdout.partition("RECOMMENDED")[2].splitlines()
    assert answer[1].strip() == "longest context that fits: 11,264 tokens"
