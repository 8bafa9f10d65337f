"""Horizontal bars with their names and values written beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from budgetfit.reporting.html.colors import color
from budgetfit.reporting.html.svg import Drawing, draw

if TYPE_CHECKING:
    from markupsafe import Markup


_ROW = 34  # pixels
_NARROW_ROW = 52  # with the name above its bar


class Bar(NamedTuple):
    """One bar: its name, length, the text beside it, and its colour's name.

    ``hollow``: drawn as an outline. ``said``: what it says on hover; "": name and text.
    """

    name: str
    value: float
    text: str
    color: str
    hollow: bool = False
    said: str = ""


def bars(label: str, rows: Sequence[Bar]) -> Markup:
    """Draw bars, the first on top."""

    def paint(drawing: Drawing) -> None:
        axes = drawing.axes
        places = [-float(number) for number in range(len(rows))]
        drawn = axes.barh(
            places,
            [row.value for row in rows],
            height=0.36 if drawing.narrow else 0.62,
            color=["none" if row.hollow else color(row.color) for row in rows],
            edgecolor=[color(row.color) for row in rows],
            linewidth=1.5,
        )
        most = max((row.value for row in rows), default=1) or 1
        for bar, place, row in zip(drawn, places, rows, strict=True):
            drawing.say(bar, row.said or f"{row.name}: {row.text}")
            _write(drawing, row, place)
        axes.set_xlim(0, most * (1.02 if drawing.narrow else 1.45))
        axes.set_ylim(places[-1] - 0.5, 0.75 if drawing.narrow else 0.5)
        axes.set_xticks([])
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0, labelcolor=color("ink"))
        names = [] if drawing.narrow else [row.name for row in rows]
        axes.set_yticks([] if drawing.narrow else places, names)

    return draw(
        paint,
        label=label,
        height=_ROW * len(rows) + 16,
        narrow_height=_NARROW_ROW * len(rows) + 16,
    )


def _write(drawing: Drawing, row: Bar, place: float) -> None:
    if drawing.narrow:
        drawing.axes.annotate(row.name, (0, place + 0.26), va="bottom")
        drawing.axes.annotate(
            row.text,
            (1, place + 0.26),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            color=color("soft-ink"),
        )
        return
    drawing.axes.annotate(
        row.text,
        (row.value, place),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        color=color("soft-ink"),
    )
