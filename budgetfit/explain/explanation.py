"""Explanation: the result of ``budgetfit explain``."""

from dataclasses import dataclass, field
from typing import Literal

from budgetfit.core.allocator.out_of_memory_message import OutOfMemoryMessage
from budgetfit.explain.failed_phase import FailedPhase

Cause = Literal[
    "fragmentation",
    "other processes",
    "limit of the process",
    "one tensor larger than the card",
    "driver pages to host memory",
    "more free than asked for",
    "the model and its batch",
    "outside the allocator",
    "host memory",
]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One row of the memory breakdown of a GPU."""

    name: str
    bytes: int
    meaning: str


@dataclass(frozen=True, slots=True)
class Advice:
    """One recommended change.

    Attributes:
        text: What to change and why, in a sentence.
        gain_bytes: Upper bound of freed memory; None where it depends on the model.
        enough: Whether ``gain_bytes`` covers the missing memory.
    """

    text: str
    commands: tuple[str, ...] = ()
    gain_bytes: int | None = None
    enough: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explanation of an out-of-memory message.

    Attributes:
        messages: Number of messages in the text; this is the last.
        where: The phase of training, from the traceback.
        summary: The cause in a sentence, with numbers.
        missing_bytes: Requested less free bytes; None if unknown.
        parts: Memory breakdown of the GPU, largest first.
        advice: Recommended changes, most helpful first.
    """

    message: OutOfMemoryMessage
    messages: int
    where: FailedPhase
    cause: Cause
    summary: str
    missing_bytes: int | None
    parts: tuple[MemoryPart, ...] = ()
    advice: tuple[Advice, ...] = field(default=())
    commands: tuple[str, ...] = ()
