"""Errors: one family, readable text, fields, and safe to send between processes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from budgetfit.errors import (
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


def suggestion(gib: int = 9, **arguments: object) -> Suggestion:
    return Suggestion(arguments=arguments, recipe=None, peak_bytes=gib * GIB)


def test_does_not_fit_says_what_was_found_what_there_was_and_what_to_try() -> None:
    found = (
        suggestion(optimizer="adamw_bnb_8bit", prepare_for_kbit=False),
        suggestion(12, gpu="l40s", vram=None),
    )
    error = does_not_fit(found)
    assert not error.proven
    assert str(error).splitlines() == [
        (
            "Does not fit: the lowest peak that was found is 12.00 GiB, and 10.00 GiB "
            "are usable."
        ),
        "Largest part: optimizer state, 6.00 GiB.",
        "What would fit:",
        '  optimizer="adamw_bnb_8bit", prepare_for_kbit=False: peak 9.00 GiB',
        '  gpu="l40s" instead of vram=: peak 12.00 GiB',
    ]
    assert error.text(as_options=True).splitlines()[3:] == [
        "  --optimizer adamw_bnb_8bit --no-prepare-for-kbit: peak 9.00 GiB",
        "  --gpu l40s instead of --vram: peak 12.00 GiB",
    ]


def test_a_refusal_is_proven_where_the_optimizer_step_alone_is_too_much() -> None:
    error = DoesNotFitError(
        needed_bytes=12 * GIB,
        usable_bytes=10 * GIB,
        floor_bytes=11 * GIB,
        largest=("optimizer_state", 6 * GIB),
        notes=("experts stay in bf16",),
    )
    assert error.proven
    text = str(error)
    assert "optimizer states take 11.00 GiB, whatever" in text
    assert text.endswith("Note: experts stay in bf16.")


def test_a_large_batch_is_not_called_weights_gradients_and_states() -> None:
    def refusal(batch_bytes: int) -> DoesNotFitError:
        return DoesNotFitError(
            needed_bytes=12 * GIB,
            usable_bytes=10 * GIB,
            floor_bytes=11 * GIB,
            batch_bytes=batch_bytes,
            largest=("activations", 12 * GIB),
        )

    assert "states and the batch (10.00 GiB) take 11.00" in str(refusal(10 * GIB))
    assert "and optimizer states take 11.00" in str(refusal(GIB // 16))
    told = refusal(10 * GIB).with_suggestions(())
    assert told.batch_bytes == 10 * GIB


def suggested(rate: float, *, changes: bool = True, **arguments: Any) -> Suggestion:
    return Suggestion(
        arguments=arguments,
        recipe=None,
        peak_bytes=GIB,
        samples_per_s=rate,
        changes_training=changes,
    )


def test_the_three_best_suggestions_are_told_those_that_train_the_same_first() -> None:
    first = suggested(8, optimizer="adamw_bnb_8bit")
    further = (
        suggested(9, optimizer="sgd"),
        suggested(7, method="lora"),
        suggested(6, method="qlora"),
        suggested(1, changes=False, batch_size=1),
    )
    error = does_not_fit((first,)).with_suggestions(further)
    assert [row.samples_per_s for row in error.suggestions] == [1, 8, 7, 9, 6]
    told = str(error).split("What would fit:")[1]
    assert [name in told for name in ("batch_size", "8bit", '"lora"')] == [True] * 3
    assert "sgd" not in told


def test_does_not_fit_without_suggestions_says_so() -> None:
    assert str(does_not_fit()).endswith("No change that was tried fits.")


def test_does_not_fit_has_fields_for_programs() -> None:
    error = does_not_fit()
    assert (error.needed_bytes, error.usable_bytes) == (12 * GIB, 10 * GIB)
    assert error.largest == ("optimizer_state", 6 * GIB)
    assert error.suggestions == ()


def test_trace_error_names_module_and_op() -> None:
    error = TraceError("cannot trace", module="layers.3.router", op="aten.nonzero")
    assert str(error) == "cannot trace"
    assert (error.module, error.op) == ("layers.3.router", "aten.nonzero")


@pytest.mark.parametrize("travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
@pytest.mark.parametrize(
    "error",
    [
        BudgetfitError("plain"),
        InputError("mistyped"),
        TraceError("cannot trace", module="a.b", op="aten.item"),
        does_not_fit((suggestion(3, batch_size=1),)),
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
    again = pickle.loads(pickle.dumps(does_not_fit()))
    with pytest.raises(DoesNotFitError, match="Does not fit: the lowest"):
        raise again
