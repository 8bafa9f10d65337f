"""Measured contexts replace published ones where they belong, and are named."""

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import budgetfit
from budgetfit import Plan, Verification
from budgetfit.calibration import known_measurements
from budgetfit.calibration.file import add_measurement, read_calibration
from budgetfit.calibration.known_measurements import (
    context_for,
    store_context,
    store_step_time,
    time_factor,
    times_source,
)
from budgetfit.gpus.cuda_context import estimated_context
from budgetfit.gpus.table import find_gpu
from budgetfit.inputs.target_gpu import find_target_gpu
from budgetfit.measuring.process_memory import ProcessMemory
from budgetfit.verification.verify_plan import with_recorded_step_time
from tests.api.planned import SAMPLE_OF_MEBI
from tests.models import Mebi, alone, mean
from tests.reporting.sample_plans import sample_plan, sample_verification
from tests.verifying.test_calibration_file import measurement, step_time

MIB = 2**20
ADA = find_gpu("rtx-4090")
HERE = platform.node()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUDGETFIT_CALIBRATION", str(tmp_path))
    monkeypatch.setattr(known_measurements, "cuda_version", lambda: "13.0")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    return tmp_path


def process(outside_mib: int, **changes: Any) -> ProcessMemory:
    values: dict[str, Any] = {
        "held_bytes": (4096 + outside_mib) * MIB,
        "reserved_bytes": 4096 * MIB,
        "whole_card": False,
        "driver": "580.65",
    }
    return ProcessMemory(**values | changes)


def plan(**options: Any) -> budgetfit.Plan:
    settings = {"gpu": "rtx-4090", "vram": "2GiB", "precision": "fp32", "batch_size": 2}
    return budgetfit.plan(Mebi(2), batch=SAMPLE_OF_MEBI, **settings | options)


def test_without_measurements_published_reports_count() -> None:
    assert context_for(ADA) == (estimated_context(ADA), ())


def test_a_later_plan_uses_and_names_what_verify_measured() -> None:
    note = store_context(process(470), ADA)
    (kept,) = read_calibration().measurements
    assert "Later predictions for this card use its CUDA context of 470 MiB" in note
    found = plan()
    where = f"measured on this machine on {kept.date}"
    assert found.budget.context_bytes == 470 * MIB
    assert found.provenance["process"] == (
        f"reserved + the CUDA context, {where} by verify"
    )
    assert "the CUDA context takes 470 MiB (measured)" in str(found)
    text = " ".join(str(found).split())  # lines are wrapped
    assert f"process = reserved + the CUDA context, {where} by verify" in text
    estimate = found.estimate
    assert estimate.process_bytes == estimate.reserved_bytes + 470 * MIB
    assert estimate.process_range_bytes == (
        estimate.reserved_bytes + 406 * MIB,
        estimate.reserved_bytes + 534 * MIB,
    )
    found = alone(found)
    assert budgetfit.Plan.from_json(found.to_json()) == found


def test_everything_that_was_measured_on_is_kept() -> None:
    store_context(process(470), ADA)
    (kept,) = read_calibration().measurements
    assert (kept.card, kept.cuda_major, kept.cuda) == (ADA.title, 13, "13.0")
    assert (kept.driver, kept.torch) == ("580.65", str(torch.__version__))
    assert (kept.total_bytes, kept.host) == (ADA.total_bytes, HERE)


@pytest.mark.parametrize(
    "changes",
    [{"cuda_major": 12}, {"card": "NVIDIA GeForce RTX 4080"}],
    ids=["another CUDA", "another card"],
)
def test_what_was_measured_elsewhere_is_not_used(changes: dict[str, Any]) -> None:
    add_measurement(measurement(**changes))
    assert context_for(ADA) == (estimated_context(ADA), ())


def test_a_torch_without_cuda_uses_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_measurement(measurement())
    monkeypatch.setattr(known_measurements, "cuda_version", lambda: None)
    assert context_for(ADA) == (estimated_context(ADA), ())


def test_a_machine_with_the_same_home_is_told_apart() -> None:
    add_measurement(measurement(host=f"not {HERE}"))
    found, _ = context_for(ADA)
    assert found.source == "measured on another machine on 2026-11-21 by verify"


def test_a_damaged_file_is_a_note_on_a_plan_as_good_as_before(folder: Path) -> None:
    without = plan()
    (folder / "calibration.json").write_text("{")
    found = plan()
    assert found.budget == without.budget
    (note,) = [text for text in found.warnings if "verify measured" in text]
    assert "was not used" in note
    assert "damaged or not budgetfit's" in note
    assert "what verify measured before was not used" in str(found)


def test_an_edited_size_is_not_believed() -> None:
    add_measurement(measurement(outside_bytes=8000 * MIB))
    context, notes = context_for(ADA)
    assert context == estimated_context(ADA)
    assert notes[0].startswith("a CUDA context that verify kept was not used")


def test_other_processes_on_the_card_are_not_taken_for_the_context(
    folder: Path,
) -> None:
    assert "not plausible" in store_context(process(900, whole_card=True), ADA)
    assert "not plausible" in store_context(process(0, whole_card=True), ADA)
    assert list(folder.iterdir()) == []
    assert "Later" in store_context(process(500, whole_card=True), ADA)


def test_what_nvml_tells_of_this_process_is_believed_further() -> None:
    assert "Later" in store_context(process(900), ADA)


def test_a_run_without_a_whole_step_measured_nothing(folder: Path) -> None:
    assert "not measured" in store_context(None, ADA)
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("BUDGETFIT_CALIBRATION", str(folder / "file" / "below"))
    note = store_context(process(470), ADA)
    assert note.startswith("The CUDA context of 470 MiB was not kept")
    assert "cannot be" in note
    assert find_target_gpu(None, "rtx-4090").context == estimated_context(ADA)


def test_loading_every_kernel_at_the_start_is_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    context, _ = context_for(ADA)
    assert context == estimated_context(ADA, eager=True)


def test_verify_on_the_cpu_keeps_nothing(folder: Path) -> None:
    assert (
        budgetfit.verify(plan(), loss=mean, device="cpu").measured_context_bytes is None
    )
    assert list(folder.iterdir()) == []


def checked(measured_ms: float, **changes: Any) -> Verification:
    return sample_verification(step_ms=measured_ms, **changes)


def timed_plan(step_ms: float = 100.0, **changes: Any) -> Plan:
    """A plan for the card whose step takes so long."""
    found = sample_plan()
    estimate = replace(found.estimate, step_ms=step_ms, **changes)
    return replace(found, estimate=estimate, gpu=ADA)


def remember(measured_ms: float, precision: str = "bf16-mixed") -> str:
    made = timed_plan()
    recipe = replace(made.recipe, precision=precision, gradient_accumulation_steps=1)
    return store_step_time(checked(measured_ms), replace(made, recipe=recipe), ADA)


def test_without_a_verification_times_are_those_of_the_kernels() -> None:
    assert time_factor(ADA, "fp32") is None
    assert times_source(ADA, "fp32") == "kernel times by the card's rates"
    estimate = plan().estimate
    assert estimate.time_factor == 1
    assert any(note.startswith("times are estimates:") for note in estimate.notes)


def test_later_plans_multiply_times_by_what_was_measured_and_say_so() -> None:
    before = plan()
    for measured_ms in (150.0, 120.0, 130.0):
        note = remember(measured_ms, "fp32")
    assert note.startswith(
        "The step took 1.30 times as long as predicted. Later plans for this card in "
        "fp32 multiply times by 1.30, the median of 3: "
    )
    after = plan()
    assert after.estimate.step_ms == pytest.approx(1.3 * before.estimate.step_ms)
    assert after.estimate.time_factor == pytest.approx(1.3)
    assert after.recipe == before.recipe
    text = "predicted x 1.30, measured on this machine by 3 verifications, the last on "
    assert any(note.startswith(f"times: {text}") for note in after.estimate.notes)
    assert not any("times are estimates" in note for note in after.estimate.notes)
    assert after.provenance["times"].startswith(text)
    assert "(x 1.30, as measured)" in " ".join(str(after).split())
    for row in after.alternatives:
        assert row.estimate.time_factor == after.estimate.time_factor
    assert budgetfit.Plan.from_json(after.to_json()) == after


def test_a_scaled_prediction_is_measured_against_the_unscaled_one() -> None:
    scaled = timed_plan(step_ms=150.0, time_factor=1.5)
    note = store_step_time(checked(150.0 * 8), scaled, ADA)
    assert note.startswith("The step took 12.00 times as long as predicted")
    (kept,) = read_calibration().measured_steps
    assert (kept.predicted_ms, kept.measured_ms) == (100.0, 1200.0)


def test_each_precision_has_its_own_factor_and_a_new_one_takes_the_others() -> None:
    remember(120.0, "bf16-mixed")
    remember(160.0, "fp32")
    ratios = [
        found.ratio if (found := time_factor(ADA, name)) else None
        for name in ("bf16-mixed", "fp32", "fp16-mixed")
    ]
    assert ratios == pytest.approx([1.2, 1.6, 1.4])
    other = time_factor(ADA, "fp16-mixed")
    assert other is not None
    assert "by 2 verifications in bf16-mixed, fp32," in other.note


def test_another_card_has_its_own_times() -> None:
    remember(120.0)
    assert time_factor(find_gpu("t4"), "bf16-mixed") is None
    made = replace(timed_plan(), gpu=find_gpu("t4"))
    note = store_step_time(checked(120.0), made, ADA)
    assert "predicted for the NVIDIA T4" in note.replace("Tesla", "NVIDIA")
    assert len(read_calibration().measured_steps) == 1


def test_another_machine_is_named() -> None:
    add_measurement(step_time(host=f"not {HERE}"))
    found = time_factor(ADA, "bf16-mixed")
    assert found is not None
    assert "on another machine by 1 verification, the last on 2026-11-21" in found.note
    remember(120.0)
    both = time_factor(ADA, "bf16-mixed")
    assert both is not None
    assert "on several machines by 2 verifications" in both.note


@pytest.mark.parametrize(
    ("measured_ms", "why"),
    [(29.0, "mostly launches"), (39.0, "not plausible"), (2001.0, "not plausible")],
)
def test_a_time_that_says_nothing_about_others_is_told_and_not_kept(
    measured_ms: float, why: str
) -> None:
    assert why in remember(measured_ms)
    assert read_calibration().measured_steps == ()


@pytest.mark.parametrize(
    "failed",
    [
        {"out_of_memory": "CUDA out of memory."},
        {"gradients_match": False},
        {"recomputed_blocks": 0},
    ],
    ids=str,
)
def test_a_run_that_was_not_the_plan_keeps_no_time(failed: dict[str, Any]) -> None:
    check = checked(120.0, **failed)
    assert "did not run" in store_step_time(check, timed_plan(), ADA)
    assert read_calibration().measured_steps == ()


def test_an_edited_time_is_not_believed() -> None:
    add_measurement(step_time(measured_ms=1e6))
    assert time_factor(ADA, "bf16-mixed") is None


def test_only_a_card_changes_times() -> None:
    check = checked(120.0)
    assert with_recorded_step_time(check, timed_plan(), None) == check
    assert read_calibration().measured_steps == ()
    found = with_recorded_step_time(check, timed_plan(time_factor=1.25), ADA)
    assert found.time_factor == 1.25
    assert "times as long as predicted" in found.notes[-1]
