"""The cause of an out-of-memory error, from its numbers."""

from typing import Final, NamedTuple

from budgetfit.core.allocator.out_of_memory_message import OutOfMemoryMessage
from budgetfit.explain.explanation import Cause
from budgetfit.explain.memory_breakdown import ROUNDING_BYTES, MemoryBreakdown
from budgetfit.utils.format_bytes import format_bytes

_IMPOSSIBLE_BYTES: Final = 2**60
# A smaller share of the GPU is not the cause: the next tensor would have failed.
_NOTABLE_SHARE: Final = 0.02


class Diagnosis(NamedTuple):
    """The cause of an out-of-memory error.

    Attributes:
        missing_bytes: Requested less free bytes; None if unknown.
    """

    cause: Cause
    summary: str
    missing_bytes: int | None = None


def find_cause(message: OutOfMemoryMessage, parts: MemoryBreakdown) -> Diagnosis:
    """Return the most likely cause by the numbers of the message."""
    asked, total = message.requested_bytes, message.total_bytes
    reserved = message.reserved_bytes
    if message.kind == "host":
        size = "" if asked is None else f" for {format_bytes(asked)}"
        return Diagnosis(
            "host memory",
            f"The computer's own memory was full, not the card's: it was asked{size}.",
        )
    if message.kind != "allocator":
        return Diagnosis(
            "outside the allocator",
            "The driver or a CUDA library found no memory. PyTorch's "
            "allocator was not asked, so the message has no numbers.",
        )
    if reserved is not None and total is not None and reserved > total + ROUNDING_BYTES:
        return Diagnosis(
            "driver pages to host memory",
            f"PyTorch held {format_bytes(reserved)} on a card of "
            f"{format_bytes(total)}: the driver had moved the rest to host memory, "
            "which makes training many times slower before it fails.",
            asked,
        )
    if asked is not None and asked > (
        _IMPOSSIBLE_BYTES - 1 if total is None else total
    ):
        known = asked < _IMPOSSIBLE_BYTES
        size = format_bytes(asked) if known else "more than 2^60 bytes"
        of_gpu = "" if total is None else f", on a card of {format_bytes(total)}"
        return Diagnosis(
            "one tensor larger than the card",
            f"One tensor of {size} was asked for{of_gpu}.",
            max(0, asked - (message.free_bytes or 0)),
        )
    if asked is None or message.free_bytes is None:
        return Diagnosis(
            "the model and its batch",
            "The card was full. The message has no further numbers.",
        )
    return _of_numbers(message, parts, asked, message.free_bytes)


def _of_numbers(
    message: OutOfMemoryMessage, parts: MemoryBreakdown, asked: int, free: int
) -> Diagnosis:
    """Compare what was free, idle in segments, allowed, and held by others."""
    allowed, total = message.allowed_bytes, message.total_bytes or 0
    room = free
    if allowed is not None and message.reserved_bytes is not None:
        room = min(free, max(0, allowed - message.reserved_bytes))
    missing = max(0, asked - room)
    notable = max(missing, round(_NOTABLE_SHARE * total))
    idle, others = message.idle_bytes or 0, parts.others_bytes
    if idle >= notable and idle >= others:
        return Diagnosis(
            "fragmentation",
            f"{format_bytes(idle)} were reserved by PyTorch and in no tensor, but not "
            f"in one piece: with the {format_bytes(room)} that were free they would "
            f"have been enough for the {format_bytes(asked)} that were asked for.",
            missing,
        )
    if room < free and missing:
        return Diagnosis(
            "limit of the process",
            f"This process may take {format_bytes(allowed or 0)} of the card's "
            f"{format_bytes(total)}, by a memory fraction that was set; "
            f"{format_bytes(missing)} were missing.",
            missing,
        )
    if not missing:
        return Diagnosis(
            "more free than asked for",
            f"{format_bytes(asked)} were asked for and {format_bytes(free)} were free, "
            "but the driver refused: another process held them a moment before, or the "
            "system limits what one process may take (Windows, containers).",
            0,
        )
    if others >= notable:
        return Diagnosis(
            "other processes",
            f"Other processes held {format_bytes(others)} of the card; "
            f"{format_bytes(missing)} were missing.",
            missing,
        )
    held = message.allocated_bytes
    tensors = "" if held is None else f" with {format_bytes(held)} in tensors"
    return Diagnosis(
        "the model and its batch",
        f"The model and its batch filled the card{tensors}; "
        f"{format_bytes(missing)} were missing. Without fragmentation and other "
        f"processes there would be {format_bytes(idle + others)} more.",
        missing,
    )
