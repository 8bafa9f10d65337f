"""GPU memory at an out-of-memory error, from the error's text and from torch."""

import contextlib
from dataclasses import dataclass

import torch

from budgetfit.core.allocator.out_of_memory_message import (
    OutOfMemoryMessage,
    parse_out_of_memory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryStats:
    """GPU memory at the failed allocation; None where unknown.

    Attributes:
        requested_bytes: Size of the failed allocation.
        allocated_bytes, reserved_bytes: Of PyTorch's allocator in this process.
        process_bytes: Of this process, as the driver reports it.
        total_bytes, free_bytes: Of the GPU.
    """

    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def usable_bytes(self) -> int | None:
        """What this process's allocator could have reserved."""
        if self.free_bytes is None or self.reserved_bytes is None:
            return None
        return self.free_bytes + self.reserved_bytes

    @property
    def idle_bytes(self) -> int:
        """Reserved but not allocated bytes; 0 if unknown."""
        return (self.reserved_bytes or 0) - (self.allocated_bytes or 0)

    def other_bytes(self, context_bytes: int) -> int | None:
        """Return about how much memory other processes use.

        ``context_bytes``: of this process, for when the driver does not report it.
        """
        if self.total_bytes is None or self.free_bytes is None:
            return None
        mine = self.process_bytes
        if mine is None:
            mine = (self.reserved_bytes or 0) + context_bytes
        return max(0, self.total_bytes - self.free_bytes - mine)


def read_gpu_memory(text: str, device: torch.device) -> GpuMemoryStats:
    """Read memory statistics from an error's text; missing ones from torch."""
    # The text is preferred: it is from the moment of the failure; much is freed since.
    unknown = OutOfMemoryMessage(kind="allocator", start=0)
    said = next(iter(parse_out_of_memory(text)), unknown)
    allocated, reserved = said.allocated_bytes, said.reserved_bytes
    total, free = said.total_bytes, said.free_bytes
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # the device may be unusable
            if allocated is None or reserved is None:
                allocated = torch.cuda.memory_allocated(device)
                reserved = torch.cuda.memory_reserved(device)
            if total is None or free is None:
                free, total = torch.cuda.mem_get_info(device)
    return GpuMemoryStats(
        requested_bytes=said.requested_bytes,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        process_bytes=said.process_bytes,
        total_bytes=total,
        free_bytes=free,
    )
