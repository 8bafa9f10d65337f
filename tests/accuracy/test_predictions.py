"""Recordings against what budgetfit predicts for them, without a GPU.

``make accuracy`` predicts all of them: an hour of a processor where these are minutes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from budgetfit.memory.segment_addresses import SegmentAddresses
from tests.accuracy import predict
from tests.accuracy.case import Case
from tests.accuracy.cases import CASES, RECORDINGS, case_named, release
from tests.accuracy.predict import compare
from tests.accuracy.report import beyond_bounds
from tests.accuracy.test_recordings import pairs, settings
from tests.accuracy.well_formed import GPU, NULL_DRIVER

# What was recorded on another release is compared where that release is installed.
PATHS = sorted(RECORDINGS.glob(f"*/{release(torch.__version__)}/*.json"))
# Their blocks compile for half a minute; `make accuracy` does it.
SLOW = tuple(
    f"{name}-compiled-rtx-4090"
    for name in (
        "resnet-50-bf16-mixed-keep-b64",
        "t5-base-bf16-mixed-keep-b8",
        "torch-transformer-bf16-mixed-keep-b32",
    )
)
# Optimizers see weights and cards see kernels; neither sees the model.
APART = [{"model", "optimizer"}, {"model", "card"}]


def shown(case: Case) -> set[tuple[object, ...]]:
    """What a case is an example of: pairs of its settings, its model of any size.

    Of compiled code, whose traces take ten times as long, each setting for itself.
    """
    family, *words = case.family.split("-")
    named = {**settings(case), "model": family, "compile": case.compile}
    if case.compile:
        return {("compiled", *item) for item in named.items()}
    named["inputs"] = tuple({"eager", "padded", "cache"}.intersection(words))
    return {pair for pair in pairs([named]) if {name for name, _ in pair} not in APART}


def chosen() -> Iterator[Path]:
    """Recordings that show together what all of them show, of each origin."""
    by_path = {
        path: {(path.parts[-3], each) for each in shown(case_named(name))}
        for path in PATHS
        if not path.stem.startswith(SLOW)
        for name in [path.stem.removesuffix("-cudnn")]
    }
    missing = set().union(*by_path.values())
    while missing:
        path = max(by_path, key=lambda each: len(by_path[each] & missing))
        missing -= by_path[path]
        yield path


@pytest.mark.parametrize("path", sorted(chosen()), ids=lambda path: path.stem)
def test_a_prediction_is_as_good_as_the_recording(path: Path) -> None:
    recording = json.loads(path.read_text())
    found = compare(CASES[recording["name"]], recording)
    assert beyond_bounds(found, recording["origin"]) == [], found


@pytest.mark.parametrize(("origin", "rise"), [(NULL_DRIVER, True), (GPU, False)])
def test_addresses_are_those_of_what_recorded(
    origin: str, rise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "replay", lambda *_, **__: SegmentAddresses.rise)
    case = next(iter(CASES.values()))
    anything: Any = SimpleNamespace(gpu=None)
    assert predict.judge(case, anything, anything, origin) is rise
