"""What nvidia-smi shows for this process, and where the number is from."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch


def process_bytes(device: torch.device) -> tuple[int, str]:
    """Return the device memory that this process holds, and how that is known.

    NVML says it for each process. Without it, or where a container hides the process
    number, the answer is for the whole card, other processes included.
    """
    own = _from_nvml(device)
    if own is not None:
        return own, "read from NVML for this process"
    free, total = torch.cuda.mem_get_info(device)
    source = (
        "read for the whole card, other processes included: NVML did not tell this "
        "process apart (pip install nvidia-ml-py)"
    )
    return total - free, source


def _from_nvml(device: torch.device) -> int | None:
    try:
        nvml = importlib.import_module("pynvml")  # optional: nvidia-ml-py
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            return _of_this_process(nvml, device)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None


def _of_this_process(nvml: Any, device: torch.device) -> int | None:  # noqa: ANN401
    uuid = torch.cuda.get_device_properties(device).uuid
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            return int(process.usedGpuMemory)
    return None
