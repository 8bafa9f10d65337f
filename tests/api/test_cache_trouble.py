"""A cache of traces that cannot be used is told once, and nothing else changes."""

import errno
import os
from pathlib import Path

import pytest
import torch

import budgetfit
from budgetfit.api.compare import compare
from budgetfit.traces.cache import cache
from budgetfit.traces.cache import folder as files
from budgetfit.traces.cache.folder import CACHE_VARIABLE
from tests.models import Mebi

BATCH = torch.zeros(2, 512, 512)
TOLD = ("traces cannot be", "set it to off")


def told(texts: tuple[str, ...]) -> list[str]:
    return [text for text in texts if all(part in text for part in TOLD)]


def planned() -> budgetfit.Plan:
    return budgetfit.plan(Mebi(3), gpu="t4", batch=BATCH, batch_size=2)


@pytest.fixture(params=["no folder", "full disk", "read-only"])
def reason(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """Make trouble; return the words for it."""
    folder = tmp_path / "cache"
    number = errno.ENOSPC if request.param == "full disk" else errno.EROFS

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    if request.param == "no folder":
        folder.write_text("a file")
        number = errno.ENOTDIR
    elif request.param == "full disk":
        monkeypatch.setattr(cache, "write_trace", fails)
    else:
        monkeypatch.setattr(files, "whole_file", fails)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return os.strerror(number)


def test_a_plan_says_so_once_and_is_the_same(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    (text,) = told(plan.warnings)
    assert reason in text
    assert str(plan).count("traces cannot be") == 1
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    silent = planned()
    assert told(silent.warnings) == []
    assert (plan.recipe, plan.estimate) == (silent.recipe, silent.estimate)


def test_estimates_and_comparisons_say_so(reason: str) -> None:
    found = budgetfit.estimate(Mebi(3), gpu="t4", batch=BATCH)
    rows, _ = compare(Mebi(3), ["t4", "rtx-4090"], batch=BATCH, batch_size=2)
    assert reason in told(found.notes)[0]
    assert all(reason in told(row.warnings)[0] for row in rows)


def test_a_model_whose_traces_have_no_key_is_told_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    model = Mebi(3)
    model.source = torch.Generator()
    found = budgetfit.estimate(model, gpu="t4", batch=BATCH)
    assert "because of a torch._C.Generator" in "".join(found.notes)
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    off = budgetfit.estimate(model, gpu="t4", batch=BATCH)
    assert "traces" not in "".join(off.notes)


def test_a_cache_that_works_is_not_mentioned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert told(planned().warnings) == []
    assert told(planned().warnings) == []
