"""Tables beside the figures: each number with its exact value."""

from dataclasses import dataclass
from typing import NamedTuple

from budgetfit.reporting.formatting import time_text
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text


class Number(NamedTuple):
    """A number: as it is read, and exactly (HTML's ``<data value>``)."""

    text: str
    value: float


Cell = str | Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells; the first cell of a row names it."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def memory(size_bytes: int) -> Number:
    """Return a cell of bytes."""
    return Number(format_bytes(size_bytes), size_bytes)


def rate(samples_per_s: float) -> Number:
    """Return a cell of samples per second."""
    return Number(rate_text(samples_per_s), samples_per_s)


def duration(milliseconds: float) -> Number:
    """Return a cell of a time in milliseconds."""
    return Number(time_text(milliseconds), milliseconds)


def count(number: int) -> Number:
    """Return a cell of a whole number."""
    return Number(f"{number:,}", number)
