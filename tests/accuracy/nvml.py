"""What nvidia-smi shows, asked of the NVIDIA management library itself.

Only for real cards: the null driver answers, but has no process memory to tell.
"""

import ctypes
import os
from typing import Final

import torch

_NOT_AVAILABLE: Final = 2**64 - 1
_MOST_PROCESSES: Final = 256
_VERSION_LENGTH: Final = 80


class _ProcessInfo(ctypes.Structure):
    """``nvmlProcessInfo_t`` of NVML's version 2 and 3 calls."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """The card with the given UUID (text of ``GPU-...``).

    Raises:
        OSError: When the library is missing or refuses.
    """

    def __init__(self, uuid: str) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._check(self._library.nvmlInit_v2())
        self._device = ctypes.c_void_p()
        self._check(
            self._library.nvmlDeviceGetHandleByUUID(
                uuid.encode(), ctypes.byref(self._device)
            )
        )

    @property
    def driver_version(self) -> str:
        """Version of the driver, for example ``"580.65.06"``."""
        text = ctypes.create_string_buffer(_VERSION_LENGTH)
        self._check(
            self._library.nvmlSystemGetDriverVersion(
                text, ctypes.c_uint(_VERSION_LENGTH)
            )
        )
        return text.value.decode()

    def process_bytes(self) -> int | None:
        """Bytes that this process holds on the card; None where NVML cannot tell.

        In a container the driver may report another process number than the
        process knows of itself: with one process on the card there is no doubt.
        """
        found = (_ProcessInfo * _MOST_PROCESSES)()
        count = ctypes.c_uint(_MOST_PROCESSES)
        self._check(
            self._library.nvmlDeviceGetComputeRunningProcesses_v3(
                self._device, ctypes.byref(count), found
            )
        )
        processes = list(found[: count.value])
        own = [entry for entry in processes if entry.pid == os.getpid()]
        if not own and len(processes) == 1:
            own = processes
        if not own or own[0].used_bytes == _NOT_AVAILABLE:
            return None
        return int(own[0].used_bytes)

    def _check(self, status: int) -> None:
        if status != 0:
            msg = f"NVML answered with error {status}"
            raise OSError(msg)


def open_nvml() -> Nvml | None:
    """The current CUDA device in NVML; None where the library is missing or refuses.

    A recording without process bytes is still a recording.
    """
    try:
        return Nvml(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    except (OSError, AttributeError):
        return None
