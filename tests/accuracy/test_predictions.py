"""Every recording against what budgetfit predicts for it, without a GPU."""

import json
from pathlib import Path

import pytest
import torch

from tests.accuracy.cases import CASES, RECORDINGS, release
from tests.accuracy.predict import compare
from tests.accuracy.report import KNOWN_DIFFERENCES

ALLOCATED_WITHIN = 0.01
RESERVED_WITHIN = 0.03
FORMULA_WITHIN = 0.01
# What was recorded on another release is compared where that release is installed.
PATHS = sorted(RECORDINGS.glob(f"*/{release(torch.__version__)}/*.json"))


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_a_prediction_is_as_good_as_the_recording(path: Path) -> None:
    recording = json.loads(path.read_text())
    found = compare(CASES[recording["name"]], recording)
    allowed = KNOWN_DIFFERENCES.get(recording["name"])
    if allowed is None:
        assert abs(found.allocated_error) <= ALLOCATED_WITHIN
        assert abs(found.reserved_error) <= RESERVED_WITHIN
    else:
        assert abs(found.allocated_error) <= allowed.allocated
        assert abs(found.reserved_error) <= allowed.reserved
    assert abs(found.formula_error) <= FORMULA_WITHIN
