"""Whether what a page shows is what was printed."""

import re

# What a run measured; predicted times are computed, and compared like all numbers.
_MEASURED = re.compile(r"(Planned in )[\d.]+ s")


def is_shown(shown: str, printed: str) -> bool:
    """Whether ``shown`` are lines of ``printed``, one after the other.

    A line ``...`` stands for any lines, and ends of lines may be blank. Everything else
    is compared to the digit, but for times that were measured.
    """
    parts: list[list[str]] = [[]]
    for line in _lines(shown):
        if line.strip() == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    there = _lines(printed)
    start = 0
    for part in parts:
        at = _find(part, there, start)
        if at is None:
            return False
        start = at + len(part)
    return True


def _find(part: list[str], lines: list[str], start: int) -> int | None:
    for at in range(start, len(lines) - len(part) + 1):
        if lines[at : at + len(part)] == part:
            return at
    return None


def _lines(text: str) -> list[str]:
    plain = _MEASURED.sub(r"\1<time>", text)
    return [line.rstrip() for line in plain.strip("\n").split("\n")]
