"""Text report of ``budgetfit doctor``: one line per finding, with commands to run."""

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from budgetfit.doctor.facts import Finding
from budgetfit.reporting.layout import commands_text

_STYLES: Final = {"ok": "green", "note": "yellow", "problem": "bold red"}
_TOPIC_COLUMNS: Final = 16


def doctor_text(findings: Sequence[Finding]) -> RenderableType:
    """Render the findings and the number of problems."""
    return Group(*map(_finding, findings), Text(""), Text(_sum(findings)))


def _finding(finding: Finding) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=len("problem"))
    grid.add_column(width=_TOPIC_COLUMNS)
    grid.add_column(overflow="fold")
    grid.add_row(
        Text(finding.verdict, style=_STYLES[finding.verdict]),
        Text(finding.topic),
        Text(finding.meaning),
    )
    indent = " " * (len("problem") + _TOPIC_COLUMNS + 4)
    return Group(grid, commands_text(finding.commands, indent=indent))


def _sum(findings: Sequence[Finding]) -> str:
    problems = sum(finding.verdict == "problem" for finding in findings)
    if problems == 0:
        return "No problems."
    return f"{problems} problem{'s' if problems > 1 else ''}."
