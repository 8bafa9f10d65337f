"""The cause of an out-of-memory error, from its numbers."""

from dataclasses import dataclass
from typing import Final

from budgetfit.core.out_of_memory_message import OutOfMemoryMessage
from budgetfit.explain.explanation import Cause
from budgetfit.explain.memory_breakdown import ROUNDING_BYTES, MemoryBreakdown
from budgetfit.utils.format_bytes import format_bytes

_IMPOSSIBLE_BYTES: Final = 2**60
# A smaller share of the GPU is not the cause: the next tensor would have failed.
_NOTABLE_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The cause of an out-of-memory error.

    Attributes:
        cause: In a few words.
        summary: In a sentence, with numbers.
        missing_bytes: Requested less free bytes; None if unknown.
    """

    cause: Cause
    summary: str
    missing_bytes: int | None = None


def find_cause(message: OutOfMemoryMessage, parts: MemoryBreakdown) -> Diagnosis:
    """Return the most likely cause by the numbers of the message."""
    if message.kind == "host":
        asked = message.requested_bytes
        size = "" if asked is None else f" for {format_bytes(asked)}"
        return Diagnosis(
            cause="host memory",
            summary=f"The computer's own memory was full, not the card's: it was "
            f"asked{size}.",
        )
    if message.kind != "allocator":
        return Diagnosis(
            cause="outside the allocator",
            summary="The driver or a CUDA library found no memory. PyTorch's "
            "allocator was not asked, so the message has no numbers.",
        )
    return _paged(message) or _impossible(message) or _of_numbers(message, parts)


def _paged(message: OutOfMemoryMessage) -> Diagnosis | None:
    """Detect a driver that pages GPU memory to the host."""
    reserved, total = message.reserved_bytes, message.total_bytes
    if reserved is None or total is None or reserved <= total + ROUNDING_BYTES:
        return None
    return Diagnosis(
        cause="driver pages to host memory",
        summary=f"PyTorch held {format_bytes(reserved)} on a card of "
        f"{format_bytes(total)}: the driver had moved the rest to host memory, "
        "which makes training many times slower before it fails.",
        missing_bytes=message.requested_bytes,
    )


def _impossible(message: OutOfMemoryMessage) -> Diagnosis | None:
    """Detect a single tensor larger than the GPU."""
    asked, total = message.requested_bytes, message.total_bytes
    if asked is None or asked <= (_IMPOSSIBLE_BYTES - 1 if total is None else total):
        return None
    size = "more than 2^60 bytes" if asked >= _IMPOSSIBLE_BYTES else format_bytes(asked)
    of_gpu = "" if total is None else f", on a card of {format_bytes(total)}"
    return Diagnosis(
        cause="one tensor larger than the card",
        summary=f"One tensor of {size} was asked for{of_gpu}.",
        missing_bytes=max(0, asked - (message.free_bytes or 0)),
    )


def _of_numbers(message: OutOfMemoryMessage, parts: MemoryBreakdown) -> Diagnosis:
    asked, free = message.requested_bytes, message.free_bytes
    if asked is None or free is None:
        return Diagnosis(
            cause="the model and its batch",
            summary="The card was full. The message has no further numbers.",
        )
    room = free
    reserved = message.reserved_bytes
    if message.allowed_bytes is not None and reserved is not None:
        room = min(free, max(0, message.allowed_bytes - reserved))
    missing = max(0, asked - room)
    notable = max(missing, round(_NOTABLE_SHARE * (message.total_bytes or 0)))
    idle, others = message.idle_bytes or 0, parts.others_bytes
    if idle >= notable and idle >= others:
        return _fragmented(idle, asked, room, missing)
    if room < free and missing:
        return _limited(message, missing)
    if not missing:
        return _refused(asked, free)
    if others >= notable:
        return Diagnosis(
            cause="other processes",
            summary=f"Other processes held {format_bytes(others)} of the card; "
            f"{format_bytes(missing)} were missing.",
            missing_bytes=missing,
        )
    return _full(message, parts, missing)


def _fragmented(idle: int, asked: int, room: int, missing: int) -> Diagnosis:
    return Diagnosis(
        cause="fragmentation",
        summary=f"{format_bytes(idle)} were reserved by PyTorch and in no tensor, but "
        f"not in one piece: with the {format_bytes(room)} that were free they would "
        f"have been enough for the {format_bytes(asked)} that were asked for.",
        missing_bytes=missing,
    )


def _limited(message: OutOfMemoryMessage, missing: int) -> Diagnosis:
    allowed, total = message.allowed_bytes or 0, message.total_bytes or 0
    return Diagnosis(
        cause="limit of the process",
        summary=f"This process may take {format_bytes(allowed)} of the card's "
        f"{format_bytes(total)}, by a memory fraction that was set; "
        f"{format_bytes(missing)} were missing.",
        missing_bytes=missing,
    )


def _refused(asked: int, free: int) -> Diagnosis:
    return Diagnosis(
        cause="more free than asked for",
        summary=f"{format_bytes(asked)} were asked for and {format_bytes(free)} were "
        "free, but the driver refused: another process held them a moment before, or "
        "the system limits what one process may take (Windows, containers).",
        missing_bytes=0,
    )


def _full(
    message: OutOfMemoryMessage, parts: MemoryBreakdown, missing: int
) -> Diagnosis:
    allocated = message.allocated_bytes
    held = "" if allocated is None else f" with {format_bytes(allocated)} in tensors"
    gain = (message.idle_bytes or 0) + parts.others_bytes
    return Diagnosis(
        cause="the model and its batch",
        summary=f"The model and its batch filled the card{held}; "
        f"{format_bytes(missing)} were missing. Without fragmentation and other "
        f"processes there would be {format_bytes(gain)} more.",
        missing_bytes=missing,
    )
