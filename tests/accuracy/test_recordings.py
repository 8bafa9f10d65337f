"""The recorded truth is what it says it is."""

import copy
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pytest

from budgetfit.gpus.table import find_gpu
from tests.accuracy.case import Case, Checkpointing, Model, Precision
from tests.accuracy.cases import CASES, RECORDINGS, recording_path
from tests.accuracy.pairwise_cases import PAIRWISE
from tests.accuracy.well_formed import faults, phases_of

GIB = 2**30
FULL_RELEASE = "torch-2.13"  # the release of constraints.txt; others have a selection
PATHS = sorted(RECORDINGS.rglob("*.json"))
ON_NULL_DRIVER = RECORDINGS / "null-driver" / FULL_RELEASE
SOME = ON_NULL_DRIVER / "gpt2-124m-bf16-mixed-keep-b8-rtx-4090.json"


def read(path: Path) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return recording


@pytest.mark.parametrize(
    "path", PATHS, ids=["-".join([*path.parts[-3:-1], path.stem]) for path in PATHS]
)
def test_a_recording_is_well_formed_and_shows_its_case(path: Path) -> None:
    recording = read(path)
    assert faults(recording) == []
    assert recording_path(recording) == path

    card, case = recording["card"], CASES[recording["name"]]
    gpu = find_gpu(case.gpu)
    if recording["origin"] == "null driver":
        assert card["imitates"] == case.gpu
        memory_bytes = int(case.imitated_memory_gib * GIB) or gpu.total_bytes
        assert card["total_bytes"] == memory_bytes
    else:
        assert card["total_bytes"] == pytest.approx(gpu.total_bytes, rel=0.02)
    assert card["compute_capability"] == "{}.{}".format(*gpu.compute_capability)
    assert card["sm_count"] == gpu.sm_count
    assert card["threads_per_sm"] == gpu.threads_per_sm

    # Large enough for errors to show, and only what runs out of memory retries.
    assert max(phase["peak_allocated_bytes"] for phase in phases_of(recording)) > GIB
    if path.parent.name == FULL_RELEASE:  # whose bytes their memory was chosen by
        assert (recording["alloc_retries"] > 0) == case.runs_out
    else:
        assert case.runs_out or not recording["alloc_retries"]


TWINS = [
    (path, twin)
    for path in PATHS
    if path.parts[-3] == "gpu"
    for twin in RECORDINGS.glob(
        f"null-driver/{path.parent.name}/{path.stem.removesuffix('-cudnn')}.json"
    )
]


@pytest.mark.parametrize(("path", "twin"), TWINS, ids=[path.stem for path, _ in TWINS])
def test_a_card_holds_what_the_null_driver_does(path: Path, twin: Path) -> None:
    """All but cuDNN's workspaces, and where blocks are cut from segments.

    cuDNN's LSTM keeps less than PyTorch's own: there the null driver has more.
    """

    def peak_bytes(recording: dict[str, Any], kind: str) -> int:
        phases = itertools.chain.from_iterable(recording["steps"])
        return max(phase[f"peak_{kind}_bytes"] for phase in phases)

    on_card, without = read(path), read(twin)
    in_cudnn = on_card["software"]["cudnn_enabled"]
    model = on_card["case"]["model"]["name"]
    if in_cudnn and model.startswith("lstm"):
        for kind in ("allocated", "reserved"):
            assert peak_bytes(without, kind) > peak_bytes(on_card, kind)
        return
    assert peak_bytes(without, "allocated") == pytest.approx(
        peak_bytes(on_card, "allocated"), rel=1e-3
    )
    convolves = model.startswith(("resnet", "convnext", "vit", "wav2vec2"))
    assert peak_bytes(without, "reserved") == pytest.approx(
        peak_bytes(on_card, "reserved"),
        rel=0.13 if in_cudnn and convolves else 0.035 if convolves else 0.014,
    )


def test_every_case_is_recorded_on_the_null_driver() -> None:
    assert {path.stem for path in ON_NULL_DRIVER.glob("*.json")} == set(CASES)


@pytest.mark.parametrize("gpu", ["t4", "rtx-4090", "h100-80gb"])
@pytest.mark.parametrize("family", ["gpt2-124m", "llama-1.1b", "bert-base", "vit-base"])
def test_each_model_is_recorded_in_every_precision_of_a_card(
    family: str, gpu: str
) -> None:
    found = {
        (case.precision, case.checkpointing)
        for case in CASES.values()
        if case.family.startswith(family) and case.gpu == gpu
    }
    precisions = ["fp32", "fp16-mixed"] + ["bf16-mixed"] * (gpu != "t4")
    assert found >= set(itertools.product(precisions, ["keep", "recompute"]))


def settings(case: Case) -> dict[str, object]:
    return {
        "model": case.family,
        "precision": case.precision,
        "checkpointing": case.checkpointing,
        "optimizer": case.optimizer,
        "accumulation": case.gradient_accumulation_steps,
        "card": case.gpu,
        "attention": case.attention,
        "allocator": case.allocator,
        "smaller last batch": bool(case.last_batch_size),
        "runs out": case.runs_out,
    }


def pairs(rows: Iterable[dict[str, object]]) -> set[tuple[object, ...]]:
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def test_every_pair_of_settings_is_recorded() -> None:
    rows = [row._asdict() for row in PAIRWISE]
    found = pairs(settings(case) for case in CASES.values())
    values = {
        "precision": get_args(Precision),
        "checkpointing": get_args(Checkpointing),
        "optimizer": {row["optimizer"] for row in rows},
        "accumulation": (1, 4),
        "card": {row["gpu"] for row in rows},
    }
    assert values["optimizer"] >= {"adamw_torch", "sgd_momentum", "adafactor"}
    wanted = [
        dict(zip(values, row, strict=True))
        for row in itertools.product(*values.values())
        if row[-1] != "t4" or not row[0].startswith("bf16")  # a T4 has no bf16
    ]
    assert pairs(wanted) - found == set()


MODELS = {row.model.name: row.model for row in PAIRWISE}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_each_model_is_recorded_with_every_value_of_each_setting(model: Model) -> None:
    found = pairs(settings(case) for case in CASES.values() if case.model == model)
    values = {value for pair in found for value in pair}
    for precision in get_args(Precision):
        assert ("precision", precision) in values
    for optimizer in ("adamw_torch_fused", "adamw_torch", "sgd_momentum", "adafactor"):
        assert ("optimizer", optimizer) in values
    assert {1, 4} <= {value for name, value in values if name == "accumulation"}
    assert len({value for name, value in values if name == "card"}) > 2
    assert ("checkpointing", "keep") in values
    if model.chain:
        assert ("checkpointing", "mixed") in values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"origin": "gpu"}, "a device NullCUDA is not of origin gpu"),
        ({"name": "no-such-case"}, "no case is called no-such-case"),
        ({"format": 0}, "format 0 is not 1"),
        ({"parameter_bytes": 10**15}, "less is allocated after the setup"),
    ],
)
def test_a_false_recording_is_found_out(change: dict[str, Any], words: str) -> None:
    assert words in " ".join(faults(read(SOME) | change))


def test_a_device_that_is_not_the_null_driver_cannot_imitate_a_card() -> None:
    recording = read(SOME)
    recording["card"]["name"] = "NVIDIA GeForce RTX 4090"
    recording["origin"] = "gpu"
    assert faults(recording) == [
        "a card is imitated on the null driver, and only there"
    ]


def test_a_missing_phase_a_missing_step_and_a_wrong_order_are_found_out() -> None:
    without_phase, without_step, swapped = (copy.deepcopy(read(SOME)) for _ in range(3))
    del without_phase["steps"][1][0]
    del without_step["steps"][0]
    swapped["steps"][2].reverse()
    assert faults(without_phase) == ["step 1 does not have the phases of a step"]
    assert faults(without_step) == ["not 3 steps"]
    assert faults(swapped) == ["step 2 does not have the phases of a step"]


def test_sizes_that_cannot_be_are_found_out() -> None:
    recording = read(SOME)
    backward = recording["steps"][2][1]
    backward["peak_allocated_bytes"] = backward["peak_reserved_bytes"] + 512
    assert faults(recording) == ["backward: allocated bytes are out of order"]


def test_a_case_that_was_changed_later_is_found_out() -> None:
    recording = read(SOME)
    recording["case"]["batch_size"] += 1
    assert faults(recording) == ["the case has changed since the recording was made"]
