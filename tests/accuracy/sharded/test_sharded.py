"""Some of the recorded ranks, predicted to the byte; the report compares all."""

import json

import pytest

from tests.accuracy.sharded.cases import CASES, FILE, STEPS
from tests.accuracy.sharded.report import Compared, compare, table

RECORDINGS = json.loads(FILE.read_text("utf-8"))


def test_every_case_is_recorded_in_all_its_phases() -> None:
    assert set(RECORDINGS) == set(CASES)
    for name, rows in RECORDINGS.items():
        assert len(rows) == 1 + STEPS * (2 * CASES[name].accumulation + 1), name


@pytest.mark.parametrize(
    "name",
    [
        "llama, fsdp2, 7 ranks",
        "llama, fsdp2, 2 x 4, 2 micro-batches",
        "qwen2, fsdp2, kept after forward",
        "llama, fsdp2, autocast, 3 micro-batches, each reduced",
        "llama, fsdp2, 2 x 4, 3 micro-batches, each reduced",
        "bert, ddp",
        "qwen2, fsdp2, 8 loss chunks",
        "llama, ddp, 2 micro-batches, selective",
        "llama, fsdp2, offloaded",
        "gpt2, fsdp2, compiled",
        "bert, ddp, compiled",
        "qlora: ddp, buckets of 5 MiB, views",
        "int8: ddp",
        "bert, zero-1",
        "vit, zero-2",
        "llama, zero-3, overlapped, buckets of 2e6, 2 micro-batches",
    ],
)
def test_predicted_to_the_byte(name: str) -> None:
    found = compare(name, RECORDINGS[name])
    assert found.predicted == found.recorded


def test_the_worst_case_is_first_and_all_are_counted() -> None:
    exact = Compared("exact", [("forward", 100, 100)], [("forward", 100, 100)])
    less = Compared("less", [("forward", 90, 100)], [("forward", 100, 100)])
    lines = table([exact, less]).splitlines()
    assert lines[2].startswith("| less | -10.000% | +0.000% | -10.000% | 0 of 1 ")
    assert lines[3].startswith("| exact |")
    assert "allocated: 1 of 2 exact" in lines[5]
