"""A verification in a process of its own."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.errors import BudgetfitError, InputError
from budgetfit.measuring import subprocess_run
from budgetfit.reporting.json import error_json, verification_json
from tests.reporting.sample_plans import sample_plan, sample_verification


class Child:
    """Stands in for the process: says what it is told to, notes what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stdout: str) -> None:
        self.stdout = stdout
        self.stderr = "warming up\nSegmentation fault"
        self.asked: list[str] = []
        monkeypatch.setattr(subprocess_run, "_run", self)

    def __call__(
        self, arguments: Sequence[str], settings: AllocatorSettings
    ) -> subprocess.CompletedProcess[str]:
        assert settings.is_default
        assert json.loads(Path(arguments[0]).read_text(encoding="utf-8"))["recipe"]
        self.asked = list(arguments[1:])
        return subprocess.CompletedProcess([], -11, self.stdout, self.stderr)


def verify(**options: Any) -> Any:
    settings: dict[str, Any] = {
        "steps": 4,
        "device": "cpu",
        "trust_remote_code": False,
        "progress": None,
        **options,
    }
    return subprocess_run.verify_in_subprocess(sample_plan(), "m:f", **settings)


def test_the_childs_answer_is_the_verification_and_says_where_it_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = sample_verification(first_step_ms=900.0)
    child = Child(monkeypatch, verification_json(sent))
    told: list[str] = []

    found = verify(progress=told.append)

    assert found.fresh_process
    assert found.phases == sent.phases
    assert "3 real steps in a fresh process" in str(found)
    assert child.asked == [
        "--steps",
        "4",
        "--json",
        "--model",
        "m:f",
        "--device",
        "cpu",
    ]
    assert told == ["running 4 real steps in a fresh process"]


def test_what_the_child_refuses_is_refused_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Child(monkeypatch, error_json(InputError("no such model")))
    with pytest.raises(InputError, match="no such model"):
        verify()
    Child(monkeypatch, error_json(RuntimeError("shapes differ")))
    with pytest.raises(BudgetfitError, match="shapes differ"):
        verify()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("", r"code -11 .* Segmentation fault"),  # it died; its last words are told
        ('{"device": "cpu"}', "as another version does"),
    ],
)
def test_what_is_no_verification_is_told(
    monkeypatch: pytest.MonkeyPatch, answer: str, says: str
) -> None:
    Child(monkeypatch, answer)
    with pytest.raises(BudgetfitError, match=says):
        verify()
