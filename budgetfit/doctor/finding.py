"""One line of a check-up."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was looked at, and what it means.

    Attributes:
        topic: What was looked at, in one or two words.
        verdict: ``problem`` where something does not work or gives wrong numbers,
            ``note`` where it is good to know.
        meaning: One sentence.
        commands: What to do about it.
    """

    topic: str
    verdict: Verdict
    meaning: str
    commands: tuple[str, ...] = ()


def ok(topic: str, meaning: str, *commands: str) -> Finding:
    """Return that all is well; ``commands`` may still be of use."""
    return Finding(topic=topic, verdict="ok", meaning=meaning, commands=commands)


def note(topic: str, meaning: str, *commands: str) -> Finding:
    """Return what is good to know, and what may be done about it."""
    return Finding(topic=topic, verdict="note", meaning=meaning, commands=commands)


def problem(topic: str, meaning: str, *commands: str) -> Finding:
    """Return what does not work or gives wrong numbers, and what to do about it."""
    return Finding(topic=topic, verdict="problem", meaning=meaning, commands=commands)
