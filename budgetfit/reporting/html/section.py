"""Sections of the report: a figure with its legend, and the table of its numbers."""

from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A figure and its table.

    Attributes:
        figure: Inline SVG, from ``svg.draw``.
        legend: Names and colours (of ``colors.COLORS``), in the order of the figure.
        note: Where the numbers are from, if that is not the replay.
    """

    title: str
    text: str
    figure: Markup
    table: Table
    legend: tuple[tuple[str, str], ...] = ()
    note: str = ""
