"""The file that verify keeps its measurements in: whole, bounded, never in the way."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from budgetfit.calibration import file as calibration_file
from budgetfit.calibration.file import (
    CalibrationError,
    ContextMeasurement,
    StepTimeMeasurement,
    add_measurement,
    calibration_path,
    read_calibration,
)

MIB = 2**20


def measurement(**changes: Any) -> ContextMeasurement:
    values: dict[str, Any] = {
        "card": "NVIDIA GeForce RTX 4090",
        "cuda_major": 13,
        "outside_bytes": 470 * MIB,
        "whole_card": False,
        "total_bytes": 24 * 2**30,
        "driver": "580.65",
        "cuda": "13.0",
        "torch": "2.13.0+cu130",
        "host": "box",
        "date": "2026-11-21",
    }
    return ContextMeasurement(**values | changes)


def step_time(**changes: Any) -> StepTimeMeasurement:
    values: dict[str, Any] = {
        "card": "NVIDIA GeForce RTX 4090",
        "precision": "bf16-mixed",
        "measured_ms": 132.0,
        "predicted_ms": 100.0,
        "steps": 3,
        "torch": "2.13.0+cu130",
        "host": "box",
        "date": "2026-11-21",
    }
    return StepTimeMeasurement(**values | changes)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUDGETFIT_CALIBRATION", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_nothing_kept_is_nothing_to_read(folder: Path) -> None:
    assert read_calibration().measurements == ()
    assert not folder.exists()


def test_what_is_kept_is_read_again(folder: Path) -> None:
    first, second = measurement(), measurement(card="Tesla T4", outside_bytes=MIB)
    assert add_measurement(first) == folder / "calibration.json"
    add_measurement(second)
    assert read_calibration().measurements == (first, second)


def test_only_the_newest_ten_of_a_card_and_cuda_version_stay() -> None:
    other = measurement(cuda_major=12, cuda="12.8")
    add_measurement(other)
    for day in range(1, 13):
        add_measurement(measurement(date=f"2026-11-{day:02}"))
    kept = read_calibration().measurements
    assert kept[0] == other
    assert [row.date[-2:] for row in kept[1:]] == [f"{day:02}" for day in range(3, 13)]


def test_times_against_earlier_predictions_are_not_used(folder: Path) -> None:
    folder.mkdir()
    earlier = {"format": 1, "step_times": [{"roofline_ms": 1.0, "measured_ms": 2.0}]}
    (folder / "calibration.json").write_text(json.dumps(earlier))
    assert read_calibration().measured_steps == ()


def test_step_times_stand_beside_contexts() -> None:
    add_measurement(measurement())
    add_measurement(step_time())
    add_measurement(measurement(outside_bytes=MIB))
    assert read_calibration().measured_steps == (step_time(),)
    assert len(read_calibration().measurements) == 2
    assert step_time().ratio == pytest.approx(1.32)


def test_only_the_newest_ten_of_a_card_and_precision_stay() -> None:
    add_measurement(step_time(precision="fp32"))
    for steps in range(1, 13):
        add_measurement(step_time(steps=steps))
    first, *kept = read_calibration().measured_steps
    assert first.precision == "fp32"
    assert [row.steps for row in kept] == list(range(3, 13))


def test_verifications_that_end_at_once_lose_nothing() -> None:
    code = (
        "import sys\n"
        "from tests.verifying.test_calibration_file import *\n"
        "for day in range(1, 9):\n"
        "    card = f'{sys.argv[1]} {day}'\n"
        "    add_measurement(measurement(card=card))\n"
        "    add_measurement(step_time(card=card))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abcd"]
    assert [writer.wait() for writer in writers] == [0] * 4
    cards = {f"{name} {day}" for name in "abcd" for day in range(1, 9)}
    assert {row.card for row in read_calibration().measurements} == cards
    assert {row.card for row in read_calibration().measured_steps} == cards


def test_a_writer_that_never_ends_is_told_and_goes_on_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_file, "LOCK_TIMEOUT_S", 0.0)
    folder.mkdir()
    lock = folder / "calibration.lock"
    with (
        calibration_file.exclusive_lock(lock),
        pytest.raises(CalibrationError, match="another process has been writing"),
    ):
        add_measurement(measurement())
    add_measurement(measurement())  # it is free again


DAMAGED = {
    "half written": '{"format": 1, "measurements": [{"card": "NV',
    "not JSON": "context = 470",
    "foreign": '{"hello": "world"}',
    "a list": "[1, 2]",
    "newer format": '{"format": 2, "measurements": []}',
    "a size that cannot be": json.dumps(
        {
            "format": 1,
            "measurements": [measurement().model_dump() | {"outside_bytes": 10**15}],
        }
    ),
    "nothing at all": "{}",
    "a time that cannot be": json.dumps(
        {
            "format": 1,
            "measured_steps": [step_time().model_dump() | {"measured_ms": -1.0}],
        }
    ),
    "a field too many": json.dumps(
        {"format": 1, "measurements": [measurement().model_dump() | {"x": 1}]}
    ),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_foreign_file_is_named_and_left_alone(
    folder: Path, text: str
) -> None:
    folder.mkdir()
    path = folder / "calibration.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match="damaged or not budgetfit's"):
        read_calibration()
    with pytest.raises(CalibrationError, match="damaged or not budgetfit's"):
        add_measurement(measurement())
    assert path.read_text() == text


def test_bytes_that_are_no_text_are_told(folder: Path) -> None:
    folder.mkdir()
    (folder / "calibration.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="UnicodeDecodeError"):
        read_calibration()


def test_a_user_without_a_home_gets_no_folder_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BUDGETFIT_CALIBRATION")
    monkeypatch.setattr(
        calibration_file, "user_state_path", lambda *_, **__: Path("~/.local/state")
    )
    with pytest.raises(CalibrationError, match="there is no home folder"):
        calibration_path()


def test_without_the_variable_it_is_the_users_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BUDGETFIT_CALIBRATION")
    monkeypatch.setattr(
        calibration_file, "user_state_path", lambda name, **_: tmp_path / name
    )
    assert calibration_path() == tmp_path / "budgetfit" / "calibration.json"
