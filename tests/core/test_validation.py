"""Whole numbers at the door."""

from typing import Any

import numpy as np
import pytest
import torch

from budgetfit.core.adapter import parse_adapter
from budgetfit.core.loop import Loop
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.sample_dims import SampleDims
from budgetfit.core.samples.sample_lengths import summarize_lengths
from budgetfit.core.units import parse_bytes
from budgetfit.core.validation import (
    MAX_SAMPLES,
    check_batch,
    check_positive_int,
    parse_image_size,
    python_number,
)
from budgetfit.errors import InputError


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, True, 1.0, "8", None, float("nan")),
        *(np.float64(4), np.bool_(1), torch.tensor(4.0), np.array([4])),
    ],
)
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
    setting: dict[str, Any],
) -> None:
    (name,) = setting
    with pytest.raises(InputError, match=f"{name} is a setting of adapters"):
        parse_adapter(None, **setting)


def test_one_name_as_target_modules_is_a_name_and_no_pattern() -> None:
    for given in ("q_proj", ["q_proj"]):
        adapter = parse_adapter("lora", target_modules=given)
        assert adapter is not None
        assert adapter.target_modules == ("q_proj",)
    pattern = parse_adapter("lora", target_modules=r".*\.q_proj")
    assert pattern is not None
    assert pattern.target_modules == r".*\.q_proj"


class Four:
    """Of a library of one's own: what ``operator.index`` takes."""

    def __index__(self) -> int:
        return 4


@pytest.mark.parametrize(
    "four", [np.int64(4), np.uint8(4), np.array(4), torch.tensor(4), Four()]
)
def test_whole_numbers_of_any_library_are_counts(four: Any) -> None:
    assert type(check_positive_int("size", four)) is int
    recipe = Recipe(batch_size=four, gradient_accumulation_steps=four)
    assert recipe == Recipe(batch_size=4, gradient_accumulation_steps=4)
    assert type(recipe.batch_size) is int
    assert Parallelism(engine="fsdp2", gpus=four, shard=four).gpus == 4
    assert Loop(evaluation_batch_size=four, max_grad_norm=np.float32(1)).ema is False
    assert parse_image_size(four) == parse_image_size((four, four)) == (4, 4)
    assert SampleDims.parse({"x": four}, 0).named == {"x": 4}
    assert summarize_lengths([four, four]) == summarize_lengths({4: 2})
    assert parse_bytes(four, least_bytes=0) == 4


def test_numbers_in_lists_are_pythons_and_the_rest_stays() -> None:
    given = [np.int64(1), (np.float32(0.5), "x"), None, {"k": np.int64(1)}]
    assert python_number(given) == [1, (0.5, "x"), None, {"k": 1}]
    assert [type(each) for each in python_number((np.float64(1.5), np.bool_(1)))] == [
        float,
        bool,
    ]
    meta = torch.zeros((), device="meta")
    assert python_number(meta) is meta
