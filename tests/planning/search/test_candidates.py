from typing import Any

import pytest

from budgetfit.core.precision import requested_precisions
from budgetfit.core.validation import check_batch
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu

ADA, T4 = find_gpu("rtx-4090"), find_gpu("t4")


def test_auto_is_what_the_card_has_hardware_for() -> None:
    assert requested_precisions("auto", ADA) == ("bf16-mixed",)
    assert requested_precisions("auto", T4) == ("fp16-mixed",)


def test_a_list_is_compared_in_its_order_without_repetition() -> None:
    assert requested_precisions(["fp32", "auto", "bf16-mixed"], ADA) == (
        "fp32",
        "bf16-mixed",
    )


def test_what_a_card_only_emulates_is_refused() -> None:
    with pytest.raises(InputError, match=r"needs compute capability 8\.0, and .*T4"):
        requested_precisions(["fp32", "bf16"], T4)


def test_unknown_and_missing_precisions_are_refused() -> None:
    with pytest.raises(InputError, match="'bf61' is not a precision"):
        requested_precisions("bf61", ADA)
    with pytest.raises(InputError, match="list of precisions is empty"):
        requested_precisions([], ADA)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("fp16", "fp16-mixed"), ("torch.float16", "fp16-mixed"), ("float32", "fp32")],
)
def test_names_of_others_get_the_nearest_precision_as_the_example(
    name: str, meant: str
) -> None:
    with pytest.raises(InputError, match=f'for example precision="{meant}"'):
        requested_precisions(name, ADA)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8"])
def test_a_size_that_is_no_whole_number_is_refused(size: Any) -> None:
    with pytest.raises(InputError, match="batch_size must be a whole number"):
        check_batch(size, None)
    with pytest.raises(InputError, match="effective_batch_size must be a whole number"):
        check_batch(None, size)


def test_a_micro_batch_must_divide_the_effective_one() -> None:
    check_batch(8, 64)
    check_batch(None, 7)
    with pytest.raises(InputError, match=r"does not divide .* smaller one .* is 6\."):
        check_batch(7, 48)
