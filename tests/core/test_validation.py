"""Whole numbers at the door."""

import pytest

from budgetfit.core.adapter import parse_adapter
from budgetfit.core.recipe import Recipe
from budgetfit.core.validation import MAX_SAMPLES, check_batch, check_positive_int
from budgetfit.errors import InputError


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8", None, float("nan")])
def test_what_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="size must be a whole number of at least 1"):
        check_positive_int("size", value)


def test_a_long_text_is_not_told_again_in_full() -> None:
    with pytest.raises(InputError) as caught:
        check_positive_int("size", "x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [MAX_SAMPLES + 1, 10**400])
def test_what_no_card_holds_is_refused_before_bytes_overflow(value: int) -> None:
    with pytest.raises(InputError, match="batch_size can be 16,777,216 at most"):
        Recipe(batch_size=value)
    with pytest.raises(InputError, match="batch_size can be 16,777,216 at most"):
        check_batch(value, None)


def test_a_vast_effective_batch_is_divided_at_once() -> None:
    with pytest.raises(InputError, match="The next smaller one that does is 1"):
        check_batch(2, 2**31 - 1)


@pytest.mark.parametrize(
    "setting",
    [
        {"lora_r": 8},
        {"lora_alpha": 8},
        {"lora_dropout": 0.1},
        {"target_modules": "q_proj"},
    ],
)
def test_settings_of_adapters_without_a_method_are_refused(
    setting: dict[str, object],
) -> None:
    (name,) = setting
    with pytest.raises(InputError, match=f"{name} is a setting of adapters"):
        parse_adapter(None, **setting)  # type: ignore[arg-type]


def test_one_name_as_target_modules_is_a_name_and_no_pattern() -> None:
    for given in ("q_proj", ["q_proj"]):
        adapter = parse_adapter("lora", target_modules=given)
        assert adapter is not None
        assert adapter.target_modules == ("q_proj",)
    pattern = parse_adapter("lora", target_modules=r".*\.q_proj")
    assert pattern is not None
    assert pattern.target_modules == r".*\.q_proj"
