"""Programs under allocator settings: predicted as well as without."""

import pytest

from tests.accuracy.allocator_settings import compare, recorded_rows
from tests.accuracy.record_allocator_settings import COMBINATIONS, PROGRAMS
from tests.accuracy.report import TARGETS

MOST_OVER = 1.0  # percent
ROWS = list(recorded_rows())


@pytest.mark.parametrize("program", PROGRAMS)
def test_settings_are_predicted_as_well_as_defaults(program: str) -> None:
    rows = [compare(*row) for row in ROWS if row[0] == program]
    for row in rows:
        allocated, reserved = (100 * error for error in row.errors)
        assert abs(allocated) <= TARGETS["null driver", "allocated"][0], row
        assert -TARGETS["null driver", "reserved"][0] <= reserved <= MOST_OVER, row
        if "garbage" not in row.settings:  # ... of which more steps are played
            assert reserved == 0, row


def test_every_program_was_recorded_under_every_setting() -> None:
    assert len(COMBINATIONS) >= 12
    wanted = [(each, text) for each in PROGRAMS for text in ("", *COMBINATIONS)]
    assert [row[:2] for row in ROWS] == wanted
    reserved = {row[:2]: row[2]["reserved"] for row in ROWS}
    for text in COMBINATIONS:  # each of them changes something
        assert any(reserved[each, text] != reserved[each, ""] for each in PROGRAMS)
