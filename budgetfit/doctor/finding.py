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
