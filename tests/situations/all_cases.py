"""All questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.situations.cases import adapters, full_training, other_models, questions

if TYPE_CHECKING:
    from tests.situations.case import Case


def all_cases() -> tuple[Case, ...]:
    """Return every question, cheap families first."""
    families = (questions, other_models, full_training, adapters)
    return tuple(case for family in families for case in family.CASES)
