"""Measured contexts replace published ones where they belong, and are named."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import pytest
import torch

import budgetfit
from budgetfit.arguments import find_card
from budgetfit.core.cuda_context import estimated_context
from budgetfit.core.gpus import find_gpu
from budgetfit.planning import calibration
from budgetfit.planning.calibration import known_context, remember_context
from budgetfit.verifying.calibration_file import keep_measurement, read_measurements
from budgetfit.verifying.process_memory import ProcessMemory
from tests.api.planned import SAMPLE_OF_MEBI
from tests.models import Mebi
from tests.verifying.test_calibration_file import measurement

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20
ADA = find_gpu("rtx-4090")
HERE = platform.node()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUDGETFIT_CALIBRATION", str(tmp_path))
    monkeypatch.setattr(calibration, "cuda_version", lambda: "13.0")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    return tmp_path


def process(outside_mib: int, **changes: Any) -> ProcessMemory:  # noqa: ANN401
    values: dict[str, Any] = {
        "held_bytes": (4096 + outside_mib) * MIB,
        "reserved_bytes": 4096 * MIB,
        "whole_card": False,
        "driver": "580.65",
    }
    return ProcessMemory(**values | changes)


def plan(**options: Any) -> budgetfit.Plan:  # noqa: ANN401
    settings = {"gpu": "rtx-4090", "vram": "2GiB", "precision": "fp32", "batch_size": 2}
    return budgetfit.plan(Mebi(2), batch=SAMPLE_OF_MEBI, **settings | options)


def test_without_measurements_published_reports_count() -> None:
    assert known_context(ADA) == (estimated_context(ADA), ())


def test_a_later_plan_uses_and_names_what_verify_measured() -> None:
    note = remember_context(process(470), ADA)
    (kept,) = read_measurements()
    assert "Later predictions for this card use its CUDA context of 470 MiB" in note
    found = plan()
    where = f"measured on this machine on {kept.date}"
    assert found.budget.context_bytes == 470 * MIB
    assert found.provenance["process"] == (
        f"reserved + the CUDA context, {where} by verify"
    )
    assert "CUDA context 470 MiB (measured)" in str(found)
    assert f"process = reserved + the CUDA context, {where} by verify" in str(found)
    estimate = found.estimate
    assert estimate.process_bytes == estimate.reserved_bytes + 470 * MIB
    assert estimate.process_range_bytes == (
        estimate.reserved_bytes + 406 * MIB,
        estimate.reserved_bytes + 534 * MIB,
    )
    assert budgetfit.Plan.from_json(found.to_json()) == found


def test_everything_that_was_measured_on_is_kept() -> None:
    remember_context(process(470), ADA)
    (kept,) = read_measurements()
    assert (kept.card, kept.cuda_major, kept.cuda) == (ADA.title, 13, "13.0")
    assert (kept.driver, kept.torch) == ("580.65", str(torch.__version__))
    assert (kept.total_bytes, kept.host) == (ADA.total_bytes, HERE)


@pytest.mark.parametrize(
    "changes",
    [{"cuda_major": 12}, {"card": "NVIDIA GeForce RTX 4080"}],
    ids=["another CUDA", "another card"],
)
def test_what_was_measured_elsewhere_is_not_used(changes: dict[str, Any]) -> None:
    keep_measurement(measurement(**changes))
    assert known_context(ADA) == (estimated_context(ADA), ())


def test_a_torch_without_cuda_uses_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_measurement(measurement())
    monkeypatch.setattr(calibration, "cuda_version", lambda: None)
    assert known_context(ADA) == (estimated_context(ADA), ())


def test_a_machine_with_the_same_home_is_told_apart() -> None:
    keep_measurement(measurement(host=f"not {HERE}"))
    found, _ = known_context(ADA)
    assert found.source == "measured on another machine on 2026-11-21 by verify"


def test_a_damaged_file_is_a_note_on_a_plan_as_good_as_before(folder: Path) -> None:
    without = plan()
    (folder / "cuda_context.json").write_text("{")
    found = plan()
    assert found.budget == without.budget
    (note,) = [text for text in found.warnings if "verify measured" in text]
    assert "was not used" in note
    assert "damaged or not budgetfit's" in note
    assert "what verify measured before was not used" in str(found)


def test_an_edited_size_is_not_believed() -> None:
    keep_measurement(measurement(outside_bytes=8000 * MIB))
    context, notes = known_context(ADA)
    assert context == estimated_context(ADA)
    assert notes[0].startswith("a CUDA context that verify kept was not used")


def test_other_processes_on_the_card_are_not_taken_for_the_context(
    folder: Path,
) -> None:
    assert "not plausible" in remember_context(process(900, whole_card=True), ADA)
    assert "not plausible" in remember_context(process(0, whole_card=True), ADA)
    assert list(folder.iterdir()) == []
    assert "Later" in remember_context(process(500, whole_card=True), ADA)


def test_what_nvml_tells_of_this_process_is_believed_further() -> None:
    assert "Later" in remember_context(process(900), ADA)


def test_a_run_without_a_whole_step_measured_nothing(folder: Path) -> None:
    assert "not measured" in remember_context(None, ADA)
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("BUDGETFIT_CALIBRATION", str(folder / "file" / "below"))
    note = remember_context(process(470), ADA)
    assert note.startswith("The CUDA context of 470 MiB was not kept")
    assert "cannot be" in note
    assert find_card(None, "rtx-4090").context == estimated_context(ADA)


def test_loading_every_kernel_at_the_start_is_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    context, _ = known_context(ADA)
    assert context == estimated_context(ADA, eager=True)


def test_verify_on_the_cpu_keeps_nothing(folder: Path) -> None:
    assert budgetfit.verify(plan(), device="cpu").measured_context_bytes is None
    assert list(folder.iterdir()) == []
