import re
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from budgetfit.doctor.check_libraries import OLDEST
from budgetfit.doctor.check_torch import MEASURED_TORCH, MEASURED_TRANSFORMERS, runs_on
from budgetfit.doctor.facts import (
    DriverFacts,
    LibraryFacts,
    Machine,
    ProcessFacts,
    TorchFacts,
)
from tests.accuracy.record import RECORDINGS
from tests.doctor import machines
from tests.doctor.machines import GIB, GOOD, NO_CARD, bad, findings, only

LIBRARIES = GOOD.libraries


@pytest.mark.parametrize("machine", [GOOD, NO_CARD, Machine(torch=machines.CPU_TORCH)])
def test_where_all_is_well_there_is_nothing_to_do(machine: Machine) -> None:
    assert [f for f in findings(machine) if f.verdict == "problem"] == []


def test_a_cpu_build_on_a_machine_with_a_card_is_a_problem() -> None:
    finding = only(GOOD, torch=machines.CPU_TORCH)
    assert (finding.topic, finding.verdict) == ("CUDA", "problem")
    assert "RTX 4090" in finding.meaning
    assert finding.commands[0].endswith("/whl/cu130")
    # An older driver, or an older card, needs an older CUDA.
    old = DriverFacts(version="550.54", cuda=(12, 4))
    for changes in ({"driver": old}, {"gpus": (machines.V100,)}):
        first = bad(GOOD, torch=machines.CPU_TORCH, **changes)[0]
        assert first.commands[0].endswith("/whl/cu126")
        assert "newer first" not in first.meaning
    oldest = DriverFacts(version="470.256", cuda=(11, 4))
    first = bad(GOOD, torch=machines.CPU_TORCH, driver=oldest)[0]
    assert "Driver 470.256 is too old" in first.meaning
    assert "driver 525 or newer first" in first.meaning


def test_a_driver_too_old_for_torchs_cuda_is_a_problem_with_both_ways_out() -> None:
    old = DriverFacts(version="550.54.14", cuda=(12, 4))
    finding = only(GOOD, driver=old, torch=replace(GOOD.torch, available=False))
    assert finding.topic == "driver"
    assert "driver 580 or newer" in finding.meaning
    assert "CUDA up to 12.4" in finding.meaning
    assert "cu126" in finding.commands[0]


def test_a_driver_of_another_minor_runs_it() -> None:
    torch = replace(GOOD.torch, cuda="12.8")
    assert bad(GOOD, torch=torch, driver=DriverFacts(version="530", cuda=(12, 1))) == []


def test_a_driver_that_fails_or_is_missing_is_a_problem() -> None:
    mismatch = DriverFacts(error="Failed to initialize NVML: Driver/library mismatch")
    dead = replace(GOOD.torch, available=False)
    finding = only(GOOD, driver=mismatch, torch=dead, gpus=())
    assert finding.commands == ("sudo reboot",)
    for error, words in (
        ("No devices were found", "sees no card"),
        ("GPU is lost.  Reboot the system", "no longer answers"),
        ("Failed to initialize NVML: Insufficient Permissions", "may not open"),
        ("Failed to initialize NVML: Unknown Error", "Start the container anew"),
        ("no answer within 20 s", "hangs"),
        ("NVIDIA-SMI has failed because it couldn't communicate", "is not loaded"),
    ):
        driver = DriverFacts(error=error)
        assert words in only(GOOD, driver=driver, torch=dead, gpus=()).meaning
    missing = only(GOOD, driver=DriverFacts(), torch=dead, gpus=())
    assert "no driver" in missing.meaning


def test_a_card_that_torch_cannot_reach_is_a_problem() -> None:
    finding = only(GOOD, torch=replace(GOOD.torch, available=False))
    assert "is_available() is False" in finding.meaning


def test_a_card_without_kernels_is_a_problem() -> None:
    found = {f.topic: f for f in bad(GOOD, gpus=(machines.V100,))}
    assert "no kernels for Tesla V100" in found["kernels"].meaning
    assert found["kernels"].commands[0].endswith("cu126")
    older = replace(GOOD.torch, architectures=("sm_50", "sm_80", "sm_90"))
    blackwell = replace(machines.RTX_4090, name="RTX 5090", capability=(12, 0))
    newer = only(GOOD, gpus=(blackwell,), torch=older)
    assert newer.commands[0].endswith("cu130")


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 9), True),  # a later minor of the same major
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),  # another major
        ("compute_80", (12, 0), True),  # compiled when it is loaded
        ("compute_90", (8, 9), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),  # for that one alone
        ("sm_120", (12, 0), True),
        ("sm_75", (7, 5), True),
    ],
)
def test_kernels_run_where_nvidia_says(
    architecture: str, capability: tuple[int, int], *, runs: bool
) -> None:
    assert runs_on(architecture, capability) is runs


def test_a_torch_that_is_missing_broken_or_old_is_a_problem() -> None:
    assert "not installed" in bad(NO_CARD, torch=TorchFacts())[0].meaning
    broken = TorchFacts(version="2.13.0", error="OSError: libcudart.so.13: cannot open")
    assert "libcudart" in bad(NO_CARD, torch=broken)[0].meaning
    old = only(NO_CARD, torch=TorchFacts(version="2.6.0+cpu"))
    assert (old.verdict, "2.11" in old.meaning) == ("problem", True)
    new = only(NO_CARD, torch=TorchFacts(version="2.99.0+cpu"))
    assert (new.verdict, "measured with 2.11, 2.13 and 2.15" in new.meaning) == (
        "note",
        True,
    )


def test_the_measured_versions_are_those_of_the_recordings() -> None:
    recorded = {path.name for path in (RECORDINGS / "null-driver").glob("torch-*")}
    assert recorded == {f"torch-{release}" for release in MEASURED_TORCH}


def test_a_torchvision_of_another_build_is_a_problem_with_the_right_index() -> None:
    vision = LibraryFacts(
        version="0.28.0+cu130",
        needs=("torch==2.13.0",),
        error="RuntimeError: operator torchvision::nms does not exist",
    )
    finding = only(NO_CARD, libraries={**LIBRARIES, "torchvision": vision})
    assert "torchvision::nms" in finding.meaning
    assert finding.commands[1] == (
        "pip install torchvision --index-url https://download.pytorch.org/whl/cpu"
    )


def test_libraries_that_ask_for_another_torch_or_each_other_are_problems() -> None:
    audio = LibraryFacts(version="2.12.0", needs=("torch==2.12.0",))
    told = only(
        GOOD,
        libraries={
            **LIBRARIES,
            "torch": LibraryFacts(version="2.13.0+cu130"),
            "torchaudio": audio,
        },
    )
    assert told.meaning == (
        "torchaudio 2.12.0 needs torch==2.12.0, and torch is 2.13.0+cu130."
    )
    old = LibraryFacts(version="0.30.0")
    told = only(GOOD, libraries={**LIBRARIES, "accelerate": old})
    assert "accelerate 0.30.0 is too old for transformers 5.23.0" in told.meaning
    assert told.commands == ("pip install --upgrade accelerate",)


@pytest.mark.parametrize("name", OLDEST)
def test_what_transformers_refuses_is_too_old(name: str) -> None:
    libraries = {**LIBRARIES, name: LibraryFacts(version="0.9.0")}
    finding = only(GOOD, libraries=libraries)
    assert f"{name} 0.9.0 is too old for transformers 5" in finding.meaning
    there = {**LIBRARIES, name: LibraryFacts(version=OLDEST[name])}
    assert bad(GOOD, libraries=there) == []


@pytest.mark.skipif(
    not transformers.__version__.startswith(MEASURED_TRANSFORMERS),
    reason="the versions are those of another transformers",
)
def test_the_oldest_versions_are_those_of_transformers() -> None:
    texts = [
        (Path(transformers.__file__).parent / name).read_text(encoding="utf-8")
        for name in ("integrations/peft.py", "utils/import_utils.py")
    ]
    for library, version in OLDEST.items():
        pattern = (
            rf'(?:MIN_)?{library.upper()}_(?:MIN_)?VERSION = "{re.escape(version)}"'
        )
        assert any(re.search(pattern, text) for text in texts), library


def test_upper_limits_of_optional_parts_are_no_findings() -> None:
    lightning = LibraryFacts(version="2.6", wants=("transformers<5,>=4.30",))
    assert bad(GOOD, libraries={**LIBRARIES, "lightning": lightning}) == []


def test_an_old_transformers_is_a_problem() -> None:
    libraries = {**LIBRARIES, "transformers": LibraryFacts(version="4.57.1")}
    assert "needs, 5" in only(GOOD, libraries=libraries).meaning


def test_a_bitsandbytes_without_its_cuda_library_is_a_problem() -> None:
    broken = LibraryFacts(version="0.50", error="No compatible CUDA binary found")
    finding = only(GOOD, libraries={**LIBRARIES, "bitsandbytes": broken})
    assert "8-bit optimizers" in finding.meaning
    assert "python -m bitsandbytes" in finding.commands


def test_emulated_bf16_is_told_although_torch_says_it_is_there() -> None:
    found = {f.topic: f for f in bad(GOOD, gpus=(machines.T4,))}
    assert found["bf16"].verdict == "note"
    assert "says True all the same" in found["bf16"].meaning
    assert "fp16=True" in found["bf16"].commands[0]


def test_what_took_too_long_is_no_problem() -> None:
    """A busy machine imports slowly; that breaks nothing."""
    slow = LibraryFacts(version="0.50", import_timeout="no answer within 40 s")
    finding = only(GOOD, libraries={**GOOD.libraries, "bitsandbytes": slow})
    assert (finding.topic, finding.verdict) == ("bitsandbytes", "note")
    assert "0.50 was not checked (no answer within 40 s)" in finding.meaning
    finding = only(GOOD, torch=TorchFacts(version="2.13.0", import_timeout="no answer"))
    assert (finding.topic, finding.verdict) == ("torch", "note")


def test_error_correction_is_told_where_it_takes_memory() -> None:
    found = {f.topic: f for f in bad(GOOD, gpus=(machines.T4,))}
    # 15 of 16 GiB.
    assert "sold as 16 GB, has 15.00 GiB" in found["ECC"].meaning
    hbm = replace(machines.RTX_4090, name="H100", total_bytes=80 * GIB, sold_as_gb=80)
    assert bad(GOOD, gpus=(replace(hbm, ecc=True),)) == []


def test_a_card_of_unknown_memory_is_not_one_of_no_memory() -> None:
    shared = replace(machines.RTX_4090, name="GB10", total_bytes=0, used_bytes=0)
    finding = only(GOOD, gpus=(replace(shared, sold_as_gb=None),))
    assert (finding.topic, finding.verdict) == ("card", "note")
    assert "GB10: the driver does not tell how much memory" in finding.meaning
    assert finding.commands == ("budgetfit plan MODEL --vram 64GiB",)


def test_who_holds_the_card_is_told_with_a_plan_for_the_rest() -> None:
    card = replace(machines.RTX_4090, used_bytes=6 * GIB)
    mine = ProcessFacts(
        pid=42, name="/usr/bin/python3", used_bytes=5 * GIB, gpu_uuid="GPU-1"
    )
    other = replace(mine, pid=7, gpu_uuid="GPU-2")
    finding = only(GOOD, gpus=(card,), processes=(mine, other))
    assert "42 python3 (5.00 GiB)" in finding.meaning
    assert "7 python3" not in finding.meaning
    # 24564 MiB less 6 GiB are 17.99 GiB.
    assert finding.commands == ("kill 42", "budgetfit plan MODEL --vram 17.9GiB")
    # The driver keeps half a GiB, which is no part of what is free.
    kept = replace(card, reserved_bytes=GIB // 2)
    (_, plan) = only(GOOD, gpus=(kept,), processes=(mine, other)).commands
    assert plan == "budgetfit plan MODEL --vram 17.4GiB"
    hidden = only(GOOD, gpus=(card,))
    assert "not listed" in hidden.meaning
    full = only(GOOD, gpus=(replace(card, used_bytes=card.total_bytes - 2**20),))
    assert "not listed: end them." in full.meaning
    assert full.commands == ("nvidia-smi",)


def test_slices_sharing_and_paging_are_told() -> None:
    assert only(GOOD, gpus=(replace(machines.RTX_4090, mig=True),)).topic == "MIG"
    assert only(GOOD, mps=True).topic == "MPS"
    assert "Sysmem Fallback" in only(GOOD, system="Windows").meaning
    paging, pinning = bad(GOOD, wsl=True)
    assert "Sysmem Fallback" in paging.meaning
    assert "WSL2 pins little host memory" in pinning.meaning
    assert bad(NO_CARD, system="Windows") == []


@pytest.mark.parametrize("hidden", ["", "-1", "3", "3,0", "GPU-7"])
def test_cards_that_are_hidden_are_a_problem(hidden: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": hidden}
    torch = replace(GOOD.torch, available=False)
    found = [
        f for f in bad(GOOD, environment=environment, torch=torch) if f.topic == "card"
    ]
    assert found[0].commands == ("unset CUDA_VISIBLE_DEVICES",)


def test_cards_that_are_chosen_are_no_problem() -> None:
    for text in ("0", "0,1", "GPU-1"):
        assert bad(GOOD, environment={"CUDA_VISIBLE_DEVICES": text}) == []


def test_tf32_that_the_environment_decides_is_told() -> None:
    off = only(GOOD, environment={"NVIDIA_TF32_OVERRIDE": "0"})
    assert "off everywhere" in off.meaning
    on = only(GOOD, environment={"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"})
    assert "less exact" in on.meaning


def test_a_cache_that_cannot_be_written_is_a_problem() -> None:
    finding = only(GOOD, cache_error="/home/me may not be written")
    assert (finding.topic, finding.verdict) == ("cache", "problem")
    assert only(GOOD, cache_folder="").verdict == "note"


def test_traces_that_nothing_can_find_again_are_told() -> None:
    finding = only(GOOD, cache_no_key="a library of no version")
    assert (finding.topic, finding.verdict) == ("cache", "note")
    assert "a library of no version" in finding.meaning


def test_a_card_that_is_named_is_judged_in_place_of_this_machines() -> None:
    named = {"gpus": (machines.V100,), "driver": DriverFacts(), "assumed": True}
    topics = {finding.topic for finding in bad(GOOD, **named)}
    assert topics == {"kernels", "bf16"}
    note = bad(NO_CARD, **named)[0]
    assert (note.verdict, note.commands[0][-5:]) == ("note", "cu126")


def test_every_finding_is_a_sentence_and_a_problem_has_a_command() -> None:
    spoilt = replace(
        GOOD,
        torch=replace(machines.TORCH, version="2.6", available=False),
        gpus=(machines.T4, machines.V100, replace(machines.T4, used_bytes=9 * GIB)),
        environment={"CUDA_VISIBLE_DEVICES": "9", "PYTORCH_ALLOC_CONF": "a:1,b"},
        driver=DriverFacts(version="1", cuda=(12, 0)),
        wsl=True,
        mps=True,
        cache_error="no",
        libraries={"peft": LibraryFacts(version="1", error="ImportError: x" * 20)},
    )
    for finding in findings(spoilt):
        assert finding.meaning.endswith((".", "?")), finding
        assert finding.commands or finding.verdict == "ok", finding
        assert not any("\n" in command for command in finding.commands)
