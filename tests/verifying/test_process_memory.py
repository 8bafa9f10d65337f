import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from budgetfit.measuring.process_memory import process_memory

DEVICE = torch.device("cuda")
GIB = 2**30


class NVMLError(Exception):
    pass


def fake_nvml(processes: list[tuple[int, int | None]]) -> SimpleNamespace:
    rows = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: {"GPU-abc": rows}[handle],
    )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    properties: Any = SimpleNamespace(uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: GIB)
    return monkeypatch


def test_nvml_tells_this_process_apart(card: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml([(1, 3 * GIB), (os.getpid(), 2 * GIB)])
    card.setitem(sys.modules, "pynvml", nvml)
    found = process_memory(DEVICE)
    assert found.held_bytes == 2 * GIB
    assert found.outside_bytes == GIB  # of which the allocator has reserved the other
    assert found.driver == "580.1"
    assert not found.whole_card
    assert found.source == "read from NVML for this process"


@pytest.mark.parametrize(
    "processes",
    [[], [(1, 3 * GIB)], [(os.getpid(), None)]],
    ids=["none seen", "another number in a container", "not told (Windows)"],
)
def test_what_nvml_does_not_tell_is_read_for_the_whole_card(
    card: pytest.MonkeyPatch, processes: list[tuple[int, int | None]]
) -> None:
    card.setitem(sys.modules, "pynvml", fake_nvml(processes))
    found = process_memory(DEVICE)
    assert found.held_bytes == 6 * GIB
    assert found.whole_card
    assert "whole card, other processes included" in found.source


def test_without_nvml_the_whole_card_is_read(card: pytest.MonkeyPatch) -> None:
    card.setitem(sys.modules, "pynvml", None)
    assert process_memory(DEVICE).held_bytes == 6 * GIB


def test_an_nvml_that_fails_is_as_good_as_none(card: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError

    nvml = fake_nvml([])
    nvml.nvmlInit = fail
    card.setitem(sys.modules, "pynvml", nvml)
    assert process_memory(DEVICE).held_bytes == 6 * GIB


def test_a_driver_that_nvml_does_not_name_stays_unknown(
    card: pytest.MonkeyPatch,
) -> None:
    nvml = fake_nvml([(os.getpid(), 2 * GIB)])
    del nvml.nvmlSystemGetDriverVersion
    card.setitem(sys.modules, "pynvml", nvml)
    assert process_memory(DEVICE).driver == ""
