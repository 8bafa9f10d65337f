"""What nvidia-smi shows for this process, and where the number is from."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch

_NVML = "read from NVML for this process"
_WHOLE_CARD = (
    "read for the whole card, other processes included: NVML did not tell this "
    "process apart (pip install nvidia-ml-py)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Device memory that this process holds at one moment.

    Attributes:
        held_bytes: All of it, as nvidia-smi shows it.
        reserved_bytes: What of it PyTorch's allocator has reserved.
        whole_card: Other processes are in it, too.
        driver: The driver's version; empty where NVML did not tell.
    """

    held_bytes: int
    reserved_bytes: int
    whole_card: bool
    driver: str

    @property
    def outside_bytes(self) -> int:
        """CUDA context and the kernels that were loaded so far."""
        return self.held_bytes - self.reserved_bytes

    @property
    def source(self) -> str:
        """How ``held_bytes`` is known, in words that follow "it was"."""
        return _WHOLE_CARD if self.whole_card else _NVML


def process_memory(device: torch.device) -> ProcessMemory:
    """Return the device memory that this process holds now.

    NVML says it for each process. Without it, or where a container hides the process
    number, the answer is for the whole card, other processes included.
    """
    own, driver = _from_nvml(device)
    held = own
    if held is None:
        free, total = torch.cuda.mem_get_info(device)
        held = total - free
    return ProcessMemory(
        held_bytes=held,
        reserved_bytes=torch.cuda.memory_reserved(device),
        whole_card=own is None,
        driver=driver,
    )


def _from_nvml(device: torch.device) -> tuple[int | None, str]:
    """Return this process's bytes and the driver's version, as far as NVML tells."""
    try:
        nvml = importlib.import_module("pynvml")  # optional: nvidia-ml-py
    except ImportError:
        return None, ""
    try:
        nvml.nvmlInit()
        try:
            return _of_this_process(nvml, device), _driver(nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None, ""


def _driver(nvml: Any) -> str:  # noqa: ANN401
    try:
        version = nvml.nvmlSystemGetDriverVersion()
    except (nvml.NVMLError, AttributeError):
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def _of_this_process(nvml: Any, device: torch.device) -> int | None:  # noqa: ANN401
    uuid = torch.cuda.get_device_properties(device).uuid
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            return int(process.usedGpuMemory)
    return None
