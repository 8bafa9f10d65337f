"""Every wrong use is answered by a clear error, a warning, or the right result."""

import pytest

from tests.misuse.case import Case, all_cases, judge

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.subject}.{case.name}")
def test_the_answer_is_clear_or_right(case: Case) -> None:
    outcome = judge(case)
    assert outcome.is_right, f"{case.did}: {outcome.happened}"


def test_names_are_unique_and_there_are_at_least_sixty() -> None:
    names = {(case.subject, case.name) for case in CASES}
    assert len(names) == len(CASES) >= 60
