"""Section: one figure of the report with what it says, its legend and its table."""

from dataclasses import dataclass

from markupsafe import Markup

from budgetfit.reporting.html.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A figure and its table.

    Attributes:
        title: What the figure shows.
        text: What to see in it.
        figure: Inline SVG, from ``svg.draw``.
        legend: Names and colours (of ``colors.COLORS``), in the order of the figure.
        table: Its numbers.
        note: Where the numbers are from, if that is not the replay.
    """

    title: str
    text: str
    figure: Markup
    table: Table
    legend: tuple[tuple[str, str], ...] = ()
    note: str = ""
