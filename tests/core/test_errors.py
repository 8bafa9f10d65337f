"""Errors: one family, readable text, fields, and safe to send between processes."""

import copy
import pickle
from collections.abc import Callable

import pytest

from budgetfit.core.errors import (
    BudgetfitError,
    DoesNotFitError,
    InputError,
    Suggestion,
    TraceError,
)

GIB = 2**30


def does_not_fit(suggestions: tuple[Suggestion, ...] = ()) -> DoesNotFitError:
    return DoesNotFitError(
        needed_bytes=12 * GIB,
        usable_bytes=10 * GIB,
        largest=("optimizer_state", 6 * GIB),
        suggestions=suggestions,
    )


def test_all_errors_are_budgetfit_errors_and_input_errors_are_value_errors() -> None:
    assert issubclass(InputError, BudgetfitError)
    assert issubclass(InputError, ValueError)
    assert issubclass(TraceError, BudgetfitError)
    assert issubclass(DoesNotFitError, BudgetfitError)


def test_does_not_fit_says_what_was_needed_what_there_was_and_what_to_try() -> None:
    error = does_not_fit(
        (
            Suggestion("optimizer adamw_bnb_8bit", None, 9 * GIB),
            Suggestion("gpu l40s", None, 12 * GIB),
        )
    )
    assert str(error).splitlines() == [
        "Does not fit: at least 12.00 GiB are needed, 10.00 GiB are usable.",
        "Largest part: optimizer state, 6.00 GiB.",
        "What would fit:",
        "  optimizer adamw_bnb_8bit: peak 9.00 GiB",
        "  gpu l40s: peak 12.00 GiB",
    ]


def test_does_not_fit_without_suggestions_says_so() -> None:
    assert str(does_not_fit()).endswith(
        "No evaluated change fits: take a smaller model or a larger card."
    )


def test_does_not_fit_has_fields_for_programs() -> None:
    error = does_not_fit()
    assert (error.needed_bytes, error.usable_bytes) == (12 * GIB, 10 * GIB)
    assert error.largest == ("optimizer_state", 6 * GIB)
    assert error.suggestions == ()


def test_trace_error_names_module_and_op() -> None:
    error = TraceError("cannot trace", module="layers.3.router", op="aten.nonzero")
    assert str(error) == "cannot trace"
    assert (error.module, error.op) == ("layers.3.router", "aten.nonzero")


@pytest.mark.parametrize("travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])  # noqa: S301, our own bytes
@pytest.mark.parametrize(
    "error",
    [
        BudgetfitError("plain"),
        InputError("mistyped"),
        TraceError("cannot trace", module="a.b", op="aten.item"),
        does_not_fit((Suggestion("smaller batch", {"batch_size": 1}, 3 * GIB),)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling_with_text_and_fields(
    error: BudgetfitError, travel: Callable[[BudgetfitError], BudgetfitError]
) -> None:
    again = travel(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


def test_a_pickled_error_can_still_carry_notes_and_be_raised() -> None:
    again = pickle.loads(pickle.dumps(does_not_fit()))  # noqa: S301, our own bytes
    with pytest.raises(DoesNotFitError, match="Does not fit: at least"):
        raise again
