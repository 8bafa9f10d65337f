"""The one line that a user came for."""

import pytest

from budgetfit.reporting.verification_text import verdict_text
from tests.reporting.sample_plans import GIB, MIB, sample_verification

BUDGET = {"usable_bytes": 22 * GIB + 512 * MIB, "room_bytes": 23 * GIB}


def test_a_pass_says_the_peak_the_prediction_and_that_it_fits() -> None:
    assert verdict_text(sample_verification(**BUDGET)) == (
        "PASSED: peak 22.00 GiB reserved, predicted 22.00 GiB (+0.00 %), fits in "
        "22.50 GiB"
    )


@pytest.mark.parametrize(
    ("shorter_reserved_bytes", "passed", "text"),
    [
        (22 * GIB + 768 * MIB, True, "256 MiB above the planned 22.50 GiB: the headr"),
        (24 * GIB, False, "24.00 GiB reserved, above the 23.00 GiB that the card has"),
    ],
)
def test_what_needs_more_than_planned_is_said_or_fails(
    shorter_reserved_bytes: int, passed: bool, text: str
) -> None:
    check = sample_verification(
        shorter_batches=1, shorter_reserved_bytes=shorter_reserved_bytes, **BUDGET
    )
    assert check.passed is passed
    assert check.fits is passed
    assert text in verdict_text(check)


def test_a_failure_says_why_the_worst_reason_first() -> None:
    check = sample_verification(
        out_of_memory="CUDA out of memory.",
        steps=1,
        gradients_match=False,
        recomputed_blocks=0,
    )
    assert verdict_text(check) == (
        "FAILED: out of memory after 1 step; gradients differ from those of the "
        "unmodified model; 0 blocks ran again, not the 16 that were planned"
    )


def test_what_noise_hides_is_not_checked_and_has_not_passed() -> None:
    check = sample_verification(gradients_match=None, gradient_noise=0.24)
    assert not check.passed
    assert verdict_text(check) == (
        "NOT CHECKED: gradients of the unmodified model differ from its own, by up to "
        "0.24 of their norm between two runs from equal seeds"
    )
    worse = sample_verification(
        gradients_match=None,
        gradient_noise=0.24,
        steps=1,
        out_of_memory="CUDA out of memory.",
    )
    assert verdict_text(worse) == "FAILED: out of memory after 1 step"


def test_a_cpu_says_at_once_what_it_cannot_check() -> None:
    # 20 predicted, 16 measured
    assert verdict_text(sample_verification(device="cpu")) == (
        "PASSED: equal gradients, prediction of live bytes off (+25 %); VRAM was not "
        "checked"
    )
