"""Draw a figure with matplotlib as inline SVG, once for wide pages and once for phones.

Text stays text in the page's font, colours are CSS variables, and a mark may say its
numbers: in its ``<title>``, and to the keyboard.
"""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from budgetfit.reporting.html.colors import as_variables, color, css_variables

GIB: Final = 2**30
WIDE, NARROW = 780, 350  # pixels
_PER_INCH: Final = 72  # SVG units of matplotlib: one is a pixel here
_SVG: Final = "{http://www.w3.org/2000/svg}"
_HREF: Final = "{http://www.w3.org/1999/xlink}href"
_DECIMALS: Final = re.compile(r"(\d\.\d\d)\d+")  # a hundredth of a pixel is enough
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may have dollar signs
    "font.size": 12.5,
    "text.color": color("ink"),
    "axes.edgecolor": color("line"),
    "axes.labelcolor": color("soft-ink"),
    "axes.axisbelow": True,
    "axes.grid": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": color("line"),
    "xtick.color": color("line"),
    "ytick.color": color("line"),
    "xtick.labelcolor": color("soft-ink"),
    "ytick.labelcolor": color("soft-ink"),
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """Axes to draw on, and what marks say.

    ``narrow``: for a phone. ``spoken``: name of a mark -> its text and whether the
    keyboard reaches it.
    """

    axes: Axes
    narrow: bool
    spoken: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def say(self, artist: Artist, text: str, *, focus: bool = True) -> None:
        """Let a mark say its numbers, to the mouse and (``focus``) to the keyboard."""
        name = f"mark{len(self.spoken)}"
        artist.set_gid(name)
        self.spoken[name] = text, focus

    def memory_axis(self, which: Literal["x", "y"], most_bytes: int) -> None:
        """Mark an axis of bytes in GiB or MiB, with a faint grid."""
        axis: Any = getattr(self.axes, f"{which}axis")
        unit, name = (GIB, "GiB") if most_bytes >= GIB else (2**20, "MiB")
        steps = 5 if self.narrow else 8
        axis.set_major_locator(_InUnits(unit, steps))
        axis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value / unit:g} {name}")
        )
        self.axes.grid(axis=which, linewidth=0.8)
        axis.set_tick_params(length=0)


class _InUnits(MaxNLocator):
    """Round ticks in a unit of bytes."""

    def __init__(self, unit: int, steps: int) -> None:
        super().__init__(steps)
        self._unit = unit

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        ticks = super().tick_values(vmin / self._unit, vmax / self._unit)
        return [tick * self._unit for tick in ticks]


def draw(
    paint: Callable[[Drawing], None],
    *,
    label: str,
    height: int,
    narrow_height: int | None = None,
) -> Markup:
    """Draw a figure for both widths; the page shows one of them.

    ``label``: what it shows, for those who do not see it. Heights are in pixels;
    ``narrow_height``: on a phone, None: the same.
    """
    heights = (WIDE, height, False), (NARROW, narrow_height or height, True)
    return Markup("\n").join(_one(paint, label, *each) for each in heights)


def standalone(figure: Markup) -> str:
    """Return the wide form of a drawn figure as an SVG file."""
    wide, end, _ = str(figure).partition("</svg>")
    root = ET.fromstring(wide + end)  # noqa: S314 - drawn here
    root.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif"}
    style = ET.Element("style")
    light, dark = css_variables(dark=False), css_variables(dark=True)
    style.text = (
        f":root {{ {light} }} "
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )
    paper = ET.Element("rect", width="100%", height="100%", fill="var(--paper)")
    root[:0] = [style, paper]
    return ET.tostring(root, encoding="unicode")


def _one(
    paint: Callable[[Drawing], None], label: str, width: int, height: int, narrow: bool
) -> Markup:
    with rc_context(_STYLE | {"svg.hashsalt": f"{label} {width}"}):
        size = width / _PER_INCH, height / _PER_INCH
        figure = Figure(figsize=size, facecolor="none", layout="constrained")
        drawing = Drawing(figure.add_subplot(facecolor="none"), narrow)
        paint(drawing)
        written = io.BytesIO()
        print_svg: Callable[..., None] = FigureCanvasSVG(figure).print_svg
        print_svg(written)
    # Written above: nothing in it is of somebody else.
    root = ET.fromstring(written.getvalue())  # noqa: S314
    _tidy(root)
    _add_speech(root, drawing.spoken)
    focusable = any(focus for _, focus in drawing.spoken.values())
    root.attrib = {
        "class": "narrow" if narrow else "wide",
        "viewBox": f"0 0 {width} {height}",
        "role": "group" if focusable else "img",
        "aria-label": label,
    }
    text = as_variables(ET.tostring(root, encoding="unicode"))
    return Markup(_in_page_font(text))  # noqa: S704 - ElementTree has escaped it


def _tidy(root: ET.Element) -> None:
    """Drop what only matplotlib needs: metadata, its style, ids that nothing names."""
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in {f"{_SVG}metadata", f"{_SVG}style"}:
                element.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        if _HREF in element.attrib:
            element.attrib["href"] = element.attrib.pop(_HREF)
        element.attrib = {
            name: _DECIMALS.sub(r"\1", value)
            for name, value in element.attrib.items()
            if not value.startswith("rotate(-0 ")
        }
        if element.tag == "g" and not element.get("id", "").startswith("mark"):
            element.attrib.pop("id", None)


def _add_speech(root: ET.Element, spoken: dict[str, tuple[str, bool]]) -> None:
    for element in root.iter():
        name = element.get("id", "")
        if name not in spoken:
            continue
        text, focus = spoken[name]
        del element.attrib["id"]
        element.attrib["class"] = "mark"
        if focus:
            element.attrib |= {"tabindex": "0", "role": "img", "aria-label": text}
        title = ET.Element("title")
        title.text = text
        element.insert(0, title)


def _in_page_font(svg: str) -> str:
    """Leave the font to the page, but for its size and weight."""
    svg = re.sub(r"font: (?:(bold|\d+) )?([\d.]+px) [^;\"]*", _font, svg)
    return re.sub(r"font-family: [^;\"]*;? ?", "", svg)


def _font(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1]}; " if found[1] else ""
    return f"{weight}font-size: {found[2]}"
