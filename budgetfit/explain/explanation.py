"""What ``explain`` answers with."""

from dataclasses import dataclass, field
from typing import Literal

from budgetfit.core.out_of_memory_message import OutOfMemoryText
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of the card's bytes.

    Attributes:
        name: Whose they were, in a few words.
        bytes: How many.
        meaning: What that is, in a few words.
    """

    name: str
    bytes: int
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to change.

    Attributes:
        text: What, and why, in a sentence.
        commands: What to type or write.
        gain_bytes: The most that it frees; None where that depends on the model.
        enough: Whether ``gain_bytes`` covers what was missing.
    """

    text: str
    commands: tuple[str, ...] = ()
    gain_bytes: int | None = None
    enough: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What an out-of-memory message means.

    Attributes:
        message: Its numbers.
        messages: How many the text holds; this is the last.
        where: The phase of training, from the traceback.
        cause: What was to blame, in a few words.
        summary: The cause in a sentence, with its numbers.
        missing_bytes: What was asked for beyond what was free; None if unknown.
        parts: Where the card's bytes were, the largest first.
        advice: What to change, what helps most first.
        commands: What to run next.
    """

    message: OutOfMemoryText
    messages: int
    where: FailedPhase
    cause: Cause
    summary: str
    missing_bytes: int | None
    parts: tuple[Part, ...] = ()
    advice: tuple[Advice, ...] = field(default=())
    commands: tuple[str, ...] = ()
