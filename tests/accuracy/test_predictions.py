"""Every recording against what budgetfit predicts for it, without a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from budgetfit.memory.segment_addresses import SegmentAddresses
from tests.accuracy import predict
from tests.accuracy.cases import CASES, RECORDINGS, release
from tests.accuracy.predict import compare
from tests.accuracy.report import TARGETS
from tests.accuracy.well_formed import GPU, NULL_DRIVER

FORMULA_WITHIN = 0.01
MOST_UNDER = 0.01  # who is told too little runs out of memory
# Inductor's layouts of convolutions without cuDNN are not those of the trace; per cent.
COMPILED_CONVOLUTIONS = {"resnet-50": (1.2, 3.0), "convnext-tiny": (0.5, 6.0)}
# What was recorded on another release is compared where that release is installed.
PATHS = sorted(RECORDINGS.glob(f"*/{release(torch.__version__)}/*.json"))


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_a_prediction_is_as_good_as_the_recording(path: Path) -> None:
    recording = json.loads(path.read_text())
    origin = recording["origin"]
    found = compare(CASES[recording["name"]], recording)
    _, allocated = TARGETS[origin, "allocated"]
    _, reserved = TARGETS[origin, "reserved"]
    if found.case.compile and found.case.family in COMPILED_CONVOLUTIONS:
        allocated, reserved = COMPILED_CONVOLUTIONS[found.case.family]
    assert abs(found.allocated_error) <= allocated / 100
    assert -MOST_UNDER <= found.reserved_error <= reserved / 100
    assert found.predicted_retries == found.recorded_retries
    assert abs(found.formula_error) <= FORMULA_WITHIN


@pytest.mark.parametrize(("origin", "rise"), [(NULL_DRIVER, True), (GPU, False)])
def test_addresses_are_those_of_what_recorded(
    origin: str, rise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "replay", lambda *_, **__: SegmentAddresses.rise)
    case = next(iter(CASES.values()))
    anything: Any = SimpleNamespace(gpu=None)
    assert predict.judge(case, anything, anything, origin) is rise
