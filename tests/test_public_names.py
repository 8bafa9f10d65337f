"""The front door: the public names are frozen, and each opens."""

import importlib

import pytest

import budgetfit

PUBLIC = (
    *("plan", "estimate", "apply", "verify", "check"),
    *(
        "Plan",
        "Recipe",
        "Segment",
        "Loop",
        "Parallelism",
        "Estimate",
        "Verification",
        "Run",
    ),
    *("BudgetfitError", "DoesNotFitError", "TraceError", "InputError"),
    *("RecomputationError", "TrainingOutOfMemoryError"),
)


def test_the_public_names_are_those_of_the_interface() -> None:
    assert sorted(PUBLIC) == budgetfit.__all__


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(importlib.import_module("budgetfit"), name) is not None
    assert name in dir(budgetfit)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        budgetfit.fit  # noqa: B018 - looking it up is the test
