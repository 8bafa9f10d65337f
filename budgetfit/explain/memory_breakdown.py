"""Memory breakdown of a full GPU, from an out-of-memory message."""

from dataclasses import dataclass
from typing import Final

from budgetfit.core.allocator.out_of_memory_message import (
    OutOfMemoryMessage,
    own_process,
)
from budgetfit.explain.explanation import MemoryPart
from budgetfit.gpus.cuda_context import estimated_context
from budgetfit.gpus.table import generic_gpu

# Sizes are printed with two decimals of a GiB: smaller differences are rounding.
ROUNDING_BYTES: Final = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Used GPU memory by owner.

    Attributes:
        outside_bytes: Of this process outside PyTorch's allocator: the CUDA context.
        others: Other processes that the message lists: pid and bytes.
        unnamed_bytes: Used memory of no listed process.
        measured: Whether the message has this process's bytes. If not,
            ``outside_bytes`` is estimated and the rest is ``unnamed_bytes``.
        usable_bytes: GPU memory that this process could use, context included; None if
            unknown.
    """

    outside_bytes: int = 0
    others: tuple[tuple[int, int], ...] = ()
    unnamed_bytes: int = 0
    measured: bool = False
    usable_bytes: int | None = None

    @property
    def others_bytes(self) -> int:
        """Memory that this process cannot use."""
        return sum(size for _, size in self.others) + self.unnamed_bytes


def break_down_memory(message: OutOfMemoryMessage) -> MemoryBreakdown:
    """Attribute the GPU's used memory to processes, as far as the message allows."""
    total, free = message.total_bytes, message.free_bytes
    reserved = message.reserved_bytes
    process, others = own_process(message)
    if total is None or free is None or reserved is None:
        return MemoryBreakdown(others=tuple(others))
    named = sum(size for _, size in others)
    if process is None:
        rest = max(0, total - free - reserved - named)
        context = estimated_context(generic_gpu(total))
        outside = rest if rest <= context.high_bytes else context.typical_bytes
        unnamed = rest - outside
    else:
        outside = max(0, process - reserved)
        unnamed = max(0, total - free - process - named)
    if unnamed < ROUNDING_BYTES:
        unnamed = 0
    usable = total - named - unnamed
    if message.allowed_bytes is not None:
        usable = min(usable, message.allowed_bytes + outside)
    return MemoryBreakdown(
        outside_bytes=outside,
        others=tuple(others),
        unnamed_bytes=unnamed,
        measured=process is not None,
        usable_bytes=usable,
    )


def breakdown_rows(
    message: OutOfMemoryMessage, parts: MemoryBreakdown
) -> tuple[MemoryPart, ...]:
    """Return the rows of the breakdown, largest first, free memory last."""
    allocated, pools = message.allocated_bytes, message.pools_bytes
    tensors = None if allocated is None else max(0, allocated - pools)
    how = "" if parts.measured else ", estimated"
    unseen = (
        "not named: the desktop, other containers"
        if parts.measured
        else "what is left: other processes, the desktop"
    )
    rows = (
        ("in tensors", tensors, "model, gradients, optimizer, activations"),
        ("private pools", pools or None, "CUDA graphs keep them for themselves"),
        (
            "fragmentation",
            message.idle_bytes,
            "reserved by PyTorch, in no tensor, not in one piece",
        ),
        (
            "CUDA context",
            parts.outside_bytes or None,
            f"of this process, outside PyTorch's allocator{how}",
        ),
        *((f"process {pid}", size, "another process") for pid, size in parts.others),
        ("others", parts.unnamed_bytes or None, unseen),
    )
    used = [MemoryPart(name, size, why) for name, size, why in rows if size is not None]
    used.sort(key=lambda part: -part.bytes)
    if message.free_bytes is not None:
        used.append(MemoryPart("free", message.free_bytes, "nobody's"))
    return tuple(used)
