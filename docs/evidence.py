"""Evidence pages: the answer and a picture first, every case behind a fold.

Takes the Markdown that the writer of a page made; ``answers.py`` says what the answer
of each page is.
"""

from __future__ import annotations

import re
import statistics
from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

from budgetfit.reporting.html.colors import color
from budgetfit.reporting.html.svg import draw, standalone

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from budgetfit.reporting.html.svg import Drawing

MOST_LINES: Final = 8  # of a table or a text that is shown without a fold
LEAST_SPAN: Final = 1.0  # percent to either side that a picture of errors shows
_FOLD: Final = '<details markdown="1">'  # MkDocs reads Markdown inside; GitHub always
_ANSWER: Final = '<div class="answer" markdown="1">'
_WHOLE: Final = {_FOLD: "</details>", _ANSWER: "</div>", "```": "```"}
_ROW: Final = 38  # pixels of a picture
_MOST_SPREAD: Final = 0.3  # of a row's height, to either side


def folded(summary: str, markdown: str) -> str:
    """Return Markdown behind a line that opens it."""
    head = f"{_FOLD}\n<summary>{escape(summary, quote=False)}</summary>"
    return f"{head}\n\n{markdown.strip()}\n\n</details>"


def with_answers(page: str, answers: Mapping[str, str]) -> str:
    """Return a page with its answers under their headings, and with folds.

    What is under a heading of the third level, up to its last table, goes behind a
    fold; so does every other table or text of over ``MOST_LINES`` lines. A page that
    was made by this function is returned with the new answers, and no second folds.

    Args:
        page: Markdown.
        answers: Heading with its ``#`` -> Markdown.

    Raises:
        ValueError: The page does not have one of the headings.
    """
    blocks = [block for block in _blocks(page) if not block.startswith(_ANSWER)]
    if missing := [heading for heading in answers if heading not in blocks]:
        raise ValueError(f"no {missing[0]!r} on the page: {blocks[0]!r}")
    done: list[str] = []
    at = 0
    while at < len(blocks):
        block, end = blocks[at], at + 1
        if block.startswith("### "):
            end = _end_of_cases(blocks, at)
        if end > at + 1:
            inside = blocks[at + 1 : end]
            rows = sum(_length(part) for part in inside)
            block = folded(f"{block[4:]}: {rows} rows", "\n\n".join(inside))
        elif (length := _length(block)) > MOST_LINES:
            block = folded(_summary(block, length), block)
        done.append(block)
        if block in answers:
            done.append(f"{_ANSWER}\n\n{answers[block].strip()}\n\n</div>")
        at = end
    return "\n\n".join(done) + "\n"


def _summary(block: str, length: int) -> str:
    """Return what a table or a text is."""
    if not block.startswith("|"):
        return f"All {length} lines"
    columns = [name for name in cells(block.split("\n", 1)[0]) if name][:3]
    return f"All {length} rows: {', '.join(columns)}, …"


def _end_of_cases(blocks: Sequence[str], heading: int) -> int:
    """Return the place behind the last table that is under a heading."""
    end = heading + 1
    for at in range(heading + 1, len(blocks)):
        if blocks[at].startswith(("#", _FOLD)):
            break
        if blocks[at].startswith("|"):
            end = at + 1
    return end


def _length(block: str) -> int:
    """Return the rows of a table, the lines of a fenced text, 0 of anything else."""
    return block.count("\n") - 1 if block.startswith(("|", "```")) else 0


def _blocks(page: str) -> Iterator[str]:
    """Yield headings, paragraphs, tables; a fold, an answer or a fence is one."""
    held: list[str] = []
    until = ""
    for line in page.splitlines():
        if not until and not line.strip():
            if held:
                yield "\n".join(held)
            held = []
            continue
        if not held:
            until = next((_WHOLE[s] for s in _WHOLE if line.startswith(s)), "")
            held.append(line)
            continue
        held.append(line)
        if line == until:
            until = ""
    if held:
        yield "\n".join(held)


# -- what a page says -----------------------------------------------------------------


def sections(page: str, heading: str) -> Iterator[str]:
    """Yield the parts of a page whose headings of the second level begin so."""
    for part in re.split(r"^(?=## )", page, flags=re.MULTILINE):
        if part.startswith(f"## {heading}"):
            yield part


def rows_after(page: str, title: str) -> list[list[str]]:
    """Return the cells of the first table after a title, its header first.

    Raises:
        ValueError: There is no such title, or no table after it.
    """
    _, found, rest = page.partition(title)
    table = re.search(r"(?:^\|.*\n?)+", rest, re.MULTILINE)
    if not found or table is None:
        raise ValueError(f"no table after {title!r}")
    header, _, *rows = (cells(line) for line in table[0].splitlines())
    return [header, *rows]


def cells(line: str) -> list[str]:
    """Return the cells of a table's line."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def number(cell: str) -> float:
    """Return the number of a cell; a percentage as it is written.

    >>> number("-1,234.50 %")
    -1234.5
    """
    return float(cell.replace(",", "").rstrip(" %"))


# -- pictures -------------------------------------------------------------------------


class Errors(NamedTuple):
    """Signed errors of some cases, in percent, and which of them are bad."""

    name: str
    percent: Sequence[float]
    bad: Sequence[bool]

    @property
    def spread(self) -> str:
        """Median, lowest and highest."""
        low, high = min(self.percent), max(self.percent)
        digits = 3 if max(-low, high) < 0.1 else 2  # noqa: PLR2004 - a tenth of a percent
        middle = statistics.median(self.percent)
        return (
            f"median {middle:+.{digits}f} %, from {low:+.{digits}f} % "
            f"to {high:+.{digits}f} %"
        )


def draw_errors(label: str, groups: Sequence[Errors], *, bad: str) -> str:
    """Return an SVG file: a row for each group, a mark for each case.

    Args:
        label: What is shown, for those who do not see it.
        groups: From top to bottom.
        bad: What a cross means.
    """

    def paint(drawing: Drawing) -> None:
        axes = drawing.axes
        axes.axvline(0, color=color("soft-ink"), linewidth=1)
        for row, group in enumerate(groups):
            for is_bad, marker, name in ((False, "o", "accent"), (True, "x", "limit")):
                points = [
                    (percent, row + _spread(case))
                    for case, percent in enumerate(group.percent)
                    if group.bad[case] == is_bad
                ]
                if points:
                    axes.scatter(
                        *zip(*points, strict=True),
                        s=22 if is_bad else 14,
                        marker=marker,
                        color=color(name),
                        alpha=0.9 if is_bad else 0.45,
                        linewidths=1.2 if is_bad else 0,
                    )
            middle = statistics.median(group.percent)
            axes.plot(
                [middle, middle], [row - 0.4, row + 0.4], color=color("ink"), lw=2
            )
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, -LEAST_SPAN), max(high, LEAST_SPAN))
        axes.set_ylim(len(groups) - 0.4, -0.6)
        names = [f"{group.name} ({len(group.percent)})" for group in groups]
        axes.set_yticks(range(len(groups)), names)
        axes.tick_params(length=0)
        axes.tick_params(axis="y", labelcolor=color("ink"))
        axes.xaxis.set_major_formatter(
            lambda value, _: f"{value:+g} %" if value else "0"
        )
        axes.grid(axis="x", linewidth=0.8)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(
            "predicted over measured, less one; above zero: predicted too much\n"
            f"bar: median; red cross: {bad}"
        )

    return standalone(draw(paint, label=label, height=_ROW * len(groups) + 80))


def _spread(case: int) -> float:
    """Return how far above or below its row's middle a case is drawn."""
    return _MOST_SPREAD * (2 * (case * 0.618 % 1) - 1)
