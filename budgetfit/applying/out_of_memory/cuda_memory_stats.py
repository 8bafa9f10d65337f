"""What a card held when it was full, from the error's text and from torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from budgetfit.core.out_of_memory_message import OutOfMemoryText, read_out_of_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """A device when it was full; None where nobody said.

    Attributes:
        requested_bytes: What was being allocated.
        allocated_bytes, reserved_bytes: PyTorch's, of this process.
        process_bytes: This process, as the driver sees it.
        total_bytes, free_bytes: The card's.
    """

    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def usable_bytes(self) -> int | None:
        """What this process's allocator could have had."""
        if self.free_bytes is None or self.reserved_bytes is None:
            return None
        return self.free_bytes + self.reserved_bytes

    @property
    def idle_bytes(self) -> int:
        """What was reserved and not allocated; 0 if unknown."""
        return (self.reserved_bytes or 0) - (self.allocated_bytes or 0)

    def other_bytes(self, context_bytes: int) -> int | None:
        """Return what other processes hold, about.

        Args:
            context_bytes: Of this process's CUDA context, if the driver does not say
                how much the process holds.
        """
        if self.total_bytes is None or self.free_bytes is None:
            return None
        mine = self.process_bytes
        if mine is None:
            mine = (self.reserved_bytes or 0) + context_bytes
        return max(0, self.total_bytes - self.free_bytes - mine)


def card_memory(text: str, device: torch.device) -> CardMemory:
    """Return what an error's text says, and where it says nothing what torch does now.

    The text is from the moment of the failure; now much of it is free again.
    """
    nothing = OutOfMemoryText(kind="allocator", start=0)
    said = next(iter(read_out_of_memory(text)), nothing)
    allocated, reserved = said.allocated_bytes, said.reserved_bytes
    total, free = said.total_bytes, said.free_bytes
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a device that broke answers nothing
            if allocated is None or reserved is None:
                allocated = torch.cuda.memory_allocated(device)
                reserved = torch.cuda.memory_reserved(device)
            if total is None or free is None:
                free, total = torch.cuda.mem_get_info(device)
    return CardMemory(
        requested_bytes=said.requested_bytes,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        process_bytes=said.process_bytes,
        total_bytes=total,
        free_bytes=free,
    )
