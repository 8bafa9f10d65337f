"""Tables in narrow terminals, and progress that is for terminals alone."""

import io

import pytest

from budgetfit.cli.output import show_progress
from budgetfit.reporting.layout import make_console, render, section, show, table

ROW = ("gradient checkpointing off", "1", "13.89 GiB", "fits")


class Terminal(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("indented", [False, True])
@pytest.mark.parametrize("columns", [20, 40, 60])
def test_a_narrow_terminal_cuts_no_number_and_no_word(
    monkeypatch: pytest.MonkeyPatch, columns: int, indented: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    rows = table(("", "batch", "reserved", ""), [ROW])
    show(section("COMPARED", rows) if indented else rows, make_console(file))
    shown = file.getvalue()
    for word in (*ROW[0].split(), *ROW[1:], "batch", "reserved"):
        assert word in shown, shown


def test_a_table_that_has_room_is_as_wide_as_its_cells() -> None:
    assert render(table(("", "a"), [("name", "1")])).splitlines() == [
        "      a",
        "name  1",
    ]


def test_forced_colour_makes_no_terminal_of_a_log_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with show_progress() as progress:
        assert progress is None
    assert capsys.readouterr().err == ""
