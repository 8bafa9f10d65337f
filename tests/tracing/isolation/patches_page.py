"""The table of what a plan changes in the process: docs/reference/patches.md."""

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "patches.md"


class Patch(NamedTuple):
    """A thing of the process that is changed, and the files where that is done."""

    name: str
    why: str
    others: str
    file: str


def patches_page() -> list[Patch]:
    """Return the rows of the table."""
    rows = PAGE.read_text(encoding="utf-8").split("|---|---|---|---|\n")[1]
    cells = (row.strip("|").replace("`", "").split("|") for row in rows.splitlines())
    return [Patch(*map(str.strip, each)) for each in cells]
