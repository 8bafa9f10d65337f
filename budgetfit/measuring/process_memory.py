"""Memory of this process: on the device (NVML), on the host, and pinned."""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")
_NVML = "read from NVML for this process"
_WHOLE_CARD = (
    "read for the whole card, other processes included: NVML did not tell this "
    "process apart (pip install nvidia-ml-py)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Device memory of this process at one moment.

    Attributes:
        held_bytes: All of it, as nvidia-smi shows it.
        reserved_bytes: The part reserved by PyTorch's allocator.
        whole_card: Other processes are included.
        driver: The driver's version; empty if unknown.
    """

    held_bytes: int
    reserved_bytes: int
    whole_card: bool
    driver: str

    @property
    def outside_bytes(self) -> int:
        """CUDA context and loaded kernels."""
        return self.held_bytes - self.reserved_bytes

    @property
    def source(self) -> str:
        """The source of ``held_bytes``, as text after "it was"."""
        return _WHOLE_CARD if self.whole_card else _NVML


def process_memory(device: torch.device) -> ProcessMemory:
    """Return the current device memory of this process."""
    # From NVML's list of processes. Without it, or where a container hides the process
    # id, for the whole card, other processes included.
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
    """Return this process's bytes and the driver's version from NVML, if known."""
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


def _driver(nvml: Any) -> str:
    try:
        version = nvml.nvmlSystemGetDriverVersion()
    except (nvml.NVMLError, AttributeError):
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def _of_this_process(nvml: Any, device: torch.device) -> int | None:
    uuid = torch.cuda.get_device_properties(device).uuid
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            return int(process.usedGpuMemory)
    return None


def resident_bytes() -> int | None:
    """Return the resident host memory of this process; None if unknown."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int | None:
    """The machine's available memory, with reclaimable caches; None if unknown."""
    try:
        rows = _MEMINFO.read_text(encoding="ascii").splitlines()
        row = next(row for row in rows if row.startswith("MemAvailable:"))
        return int(row.split()[1]) * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        return None
