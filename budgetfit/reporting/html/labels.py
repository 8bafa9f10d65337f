"""Names written beside points of a figure, where they cover least."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

_SAMPLES: Final = 20  # of each straight part of a line
_FORBIDDEN: Final = 1000  # more than a line has samples that a name can cover
# Offset in points, and how the text lies there; in order of preference.
_PLACES: Final = (
    ((-9, 5), "right", "bottom"),
    ((9, -5), "left", "top"),
    ((9, 5), "left", "bottom"),
    ((-9, -5), "right", "top"),
)


class Label(NamedTuple):
    """A name and the point that it is of, in the units of the axes."""

    text: str
    x: float
    y: float
    bold: bool = False


def write_labels(
    axes: Axes, labels: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]]
) -> None:
    """Write each name beside its point, inside the axes, off the others and the lines.

    Call it when the limits of the axes are set: names do not change them.
    """
    figure = axes.get_figure(root=True)
    if figure is None:
        return
    figure.draw_without_rendering()  # what is measured below is then as it will be
    points = [(label.x, label.y) for label in labels]
    dots = axes.transData.transform([*points, *map(tuple, _sampled(lines))])
    written: list[Bbox] = []
    for label in labels:
        note = axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(0, 0),
            textcoords="offset points",
            fontweight="bold" if label.bold else "normal",
        )
        note.set_in_layout(False)
        costs = []
        for offset, across, along in _PLACES:
            note.set(position=offset, ha=across, va=along)
            box = note.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            inside &= axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
            costs.append(
                _FORBIDDEN * (box.count_overlaps(written) + (not inside))
                + int(np.all((dots >= box.min) & (dots <= box.max), axis=1).sum())
            )
        offset, across, along = _PLACES[int(np.argmin(costs))]
        note.set(position=offset, ha=across, va=along)
        written.append(note.get_window_extent())


def _sampled(lines: Sequence[Sequence[tuple[float, float]]]) -> list[list[float]]:
    return [
        dot
        for line in lines
        for start, end in pairwise(line)
        for dot in np.linspace(start, end, _SAMPLES).tolist()
    ]
