"""Finding: one result of ``budgetfit doctor``."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: What was checked, in one or two words.
        verdict: ``problem`` where something fails or gives wrong numbers, else ``note``
            or ``ok``.
        meaning: One sentence.
        commands: How to fix it.
    """

    topic: str
    verdict: Verdict
    meaning: str
    commands: tuple[str, ...] = ()


def ok(topic: str, meaning: str, *commands: str) -> Finding:
    """Return a Finding that all is well; ``commands`` may still be useful."""
    return Finding(topic=topic, verdict="ok", meaning=meaning, commands=commands)


def note(topic: str, meaning: str, *commands: str) -> Finding:
    """Return a Finding that is good to know."""
    return Finding(topic=topic, verdict="note", meaning=meaning, commands=commands)


def problem(topic: str, meaning: str, *commands: str) -> Finding:
    """Return a Finding about something that fails or gives wrong numbers."""
    return Finding(topic=topic, verdict="problem", meaning=meaning, commands=commands)
