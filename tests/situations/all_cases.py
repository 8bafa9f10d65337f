"""All questions."""

from tests.situations.case import Case
from tests.situations.cases import adapters, full_training, other_models, questions


def all_cases() -> tuple[Case, ...]:
    """Return every question, cheap families first."""
    families = (questions, other_models, full_training, adapters)
    return tuple(case for family in families for case in family.CASES)
