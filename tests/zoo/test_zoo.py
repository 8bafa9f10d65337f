"""Every model of the zoo is traced, planned, applied and verified."""

from __future__ import annotations

import pytest

from tests.zoo.check import check
from tests.zoo.entry import zoo
from tests.zoo.known_failures import KNOWN_FAILURES


@pytest.mark.parametrize("name", zoo())
def test_a_model_is_planned_and_trains_as_without_a_plan(name: str) -> None:
    outcome = check(zoo()[name])
    if name in KNOWN_FAILURES:
        assert outcome.reason, f"{name} works: take it out of KNOWN_FAILURES"
    else:
        assert not outcome.reason, outcome.reason


def test_every_known_failure_is_in_the_zoo() -> None:
    assert zoo().keys() >= KNOWN_FAILURES.keys()
