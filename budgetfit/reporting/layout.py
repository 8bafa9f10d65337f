"""Layout of reports: console, headings, lists, tables, bars.

Text that comes from a user (names, paths, notes) is always a ``Text``, never markup, so
that brackets in it are printed as they are.
"""

import io
import sys
from collections.abc import Container, Iterable, Sequence
from typing import Final, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from budgetfit.utils.format_bytes import format_bytes

WIDTH: Final = 80
WIDE: Final = 100  # for tables with many columns
_INDENT: Final = (0, 0, 0, 2)
_GAP: Final = 2  # between the columns of a table
_NAME_WIDTH: Final = 20  # to which the names of a table may be wrapped


def make_console(file: TextIO | None = None, *, width: int = WIDTH) -> Console:
    """Return a console of at most ``width`` columns, with colour only on a terminal."""
    # ``NO_COLOR`` is respected by rich. A pipe gets the full width.
    file = file or sys.stdout
    console = Console(
        file=file,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
        force_jupyter=False,
    )
    console.width = min(console.width, width) if console.is_terminal else width
    return console


def render(report: RenderableType, *, width: int = WIDTH) -> str:
    """Render a report as plain text: no colour, ``width`` columns, ASCII symbols."""
    file = _AsciiText()
    console = Console(
        file=file,
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,  # else a notebook displays it, and the text is empty
        emoji=False,
    )
    console.print(report, crop=False)  # long commands are not wrapped
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


def show(
    report: RenderableType, console: Console | None = None, *, width: int = WIDTH
) -> None:
    """Print a report: with rich on a terminal, as plain text elsewhere."""
    console = console or make_console(width=width)
    if console.is_terminal:
        console.print(report, crop=False)
    else:  # strip trailing padding, which only a terminal hides
        console.file.write(render(report, width=width) + "\n")


class _AsciiText(io.StringIO):
    """A StringIO whose encoding makes rich choose ASCII symbols."""

    encoding = "ascii"


def section(title: str, body: RenderableType, side: str | Text = "") -> RenderableType:
    """A heading, with optional text at the right edge, above an indented body."""
    heading = Table.grid(expand=True, padding=(0, 2, 0, 0))
    heading.add_column()
    heading.add_column(justify="right")
    heading.add_row(Text(title, style="bold"), side)
    return Group(heading, _Indented(body), Text(""))


class _Indented:
    """A body, indented; as wide as its tables even where the terminal is narrower."""

    def __init__(self, body: RenderableType) -> None:
        self.body = body

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        width = max(options.max_width, _least_width(self.body) + _INDENT[-1])
        yield from console.render(
            Padding(self.body, _INDENT), options.update(width=width)
        )


def lines(texts: Iterable[str | Text]) -> RenderableType:
    """One text per line, wrapped."""
    return Group(*(text if isinstance(text, Text) else Text(text) for text in texts))


def bullets(texts: Iterable[str]) -> RenderableType:
    """A bullet list with hanging indents."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for text in texts:
        grid.add_row(Text("*"), Text(text))
    return grid


def commands_text(commands: Iterable[str], *, indent: str = "    ") -> RenderableType:
    """Commands, one per line and never wrapped, so that they can be copied."""
    return Group(
        *(
            Text(indent + command, style="bold", no_wrap=True, overflow="ignore")
            for command in commands
        )
    )


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: Container[int] = (0,)
) -> Table:
    """A table without lines; right-aligned except for the columns in ``left``."""
    # Only the first column, of names, may wrap.
    rows = list(rows)
    grid = _WholeTable(
        box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim"
    )
    for number, title in enumerate(titles):
        cells = [title, *(row[number] for row in rows if number < len(row))]
        widest = max(map(cell_len, cells))
        grid.add_column(
            Text(title),
            justify="left" if number in left else "right",
            no_wrap=number > 0,
            overflow="fold",
            min_width=widest if number > 0 else min(widest, _NAME_WIDTH),
        )
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


class _WholeTable(Table):
    """A table that is wider than a narrow terminal: no number of it is cut."""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        width = max(options.max_width, _least_width(self))
        yield from super().__rich_console__(console, options.update(width=width))


def _least_width(body: RenderableType) -> int:
    """Return the columns of text that the tables of a body take at least."""
    if isinstance(body, Group):
        return max(map(_least_width, body.renderables), default=0)
    if isinstance(body, _WholeTable):
        widths = [(column.min_width or 0) + _GAP for column in body.columns]
        return sum(widths) - _GAP
    return 0


class Bar:
    """A bar of ``share`` of ``width`` columns; of ``#`` on an ASCII console."""

    def __init__(self, share: float, width: int = 20) -> None:
        self.share = min(max(share, 0.0), 1.0)
        self.width = width

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        length = round(self.share * self.width)
        yield Text(("#" if options.ascii_only else "\u2588") * length, style="cyan")

    def __rich_measure__(
        self, console: Console, options: ConsoleOptions
    ) -> Measurement:
        return Measurement(self.width, self.width)


def fits_text(fits: bool | None, left_bytes: int | None) -> Text:
    """FITS, DOES NOT FIT, or nothing where no budget was given; and by how much."""
    if fits is None:
        return Text("")
    text = "FITS" if fits else "DOES NOT FIT"
    # Below the limit it may not fit either: the host's memory, or allocator retries.
    if left_bytes is not None and fits == (left_bytes >= 0):
        text += f", {format_bytes(abs(left_bytes))} {'left' if fits else 'over'}"
    return Text(text, "bold green" if fits else "bold red")
