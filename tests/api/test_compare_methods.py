"""compare: cards and methods in one table, and prices."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from budgetfit.api.compare import compare
from budgetfit.errors import InputError
from tests import models
from tests.integrations.adapters import QUIET

pytestmark = pytest.mark.usefixtures("kept_traces")
CARDS = ["t4", "rtx-4090"]
# One recipe: what is compared are the rows.
QUICK: dict[str, Any] = {"batch_size": 2, "checkpointing": "none"}


def gpt2() -> nn.Module:
    return models.gpt2(vocab_size=128, n_layer=2, n_embd=64, n_positions=64)


@QUIET
def test_each_card_is_asked_for_each_method() -> None:
    pytest.importorskip("peft")
    rows, model = compare(gpt2(), CARDS, methods=["full", "lora"], lora_r=4, **QUICK)
    assert [(row.gpu.name, row.method) for row in rows] == [
        (card, method) for card in CARDS for method in ("full", "lora")
    ]
    assert model.trainable_count == model.parameter_count
    for full, lora in (rows[:2], rows[2:]):
        assert full.estimate is not None
        assert lora.estimate is not None
        assert full.estimate.recipe.precision == lora.estimate.recipe.precision
        states = [
            row.estimate.at_peak_bytes.get("optimizer_state", 0)
            for row in (full, lora)
            if row.estimate is not None
        ]
        assert states[1] < states[0]
    # Settings of adapters are the lora's alone: full refuses none of them.
    (alone,) = compare(gpt2(), CARDS[:1], method="lora", lora_r=4, **QUICK)[0]
    assert alone == rows[1]
    (as_always,) = compare(gpt2(), CARDS[:1], **QUICK)[0]
    assert as_always == rows[0]


@QUIET
def test_a_method_that_the_model_cannot_be_trained_with_is_a_row_that_says_why() -> (
    None
):
    pytest.importorskip("peft")
    asked = {"target_modules": ["no_such_layer"], **QUICK}
    (full, lora), _ = compare(gpt2(), CARDS[:1], methods=["full", "lora"], **asked)
    assert full.fits
    assert lora.estimate is None
    assert "no_such_layer" in lora.problem
    with pytest.raises(InputError, match="no_such_layer"):
        compare(gpt2(), CARDS[:1], methods=["lora"], **asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"methods": []}, r'\["full", "lora"\] \(--methods full,lora\)'),
        ({"methods": "lora"}, "methods must be some of full, lora, qlora"),
        ({"methods": ["lora", "dora"]}, "methods must be some of full, lora, qlora"),
        ({"method": "lora", "methods": ["full"]}, "either method= or methods="),
        ({"method": "full", "lora_r": 4}, "lora_r is a setting of adapters"),
    ],
)
def test_methods_that_cannot_be_are_refused(
    asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        compare(gpt2(), CARDS, **asked)


def test_prices_are_those_of_the_rows_of_their_card() -> None:
    model = gpt2()
    prices = {"RTX 4090": 0.5}
    rows, _ = compare(model, CARDS, prices=prices, **QUICK)
    assert [row.price_per_hour for row in rows] == [None, 0.5]
    assert [row.samples_per_money is None for row in rows] == [True, False]
    # Prices change nothing else.
    free, _ = compare(model, CARDS, prices={}, **QUICK)
    assert free == tuple(replace(row, price_per_hour=None) for row in rows)


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ([0.35], r'example \{"rtx-4090": 0.35\} \(--price rtx-4090=0.35\); got \[0.35'),
        ({4090: 0.35}, "prices must be money per hour by card"),
        ({"t4": None}, "price of t4 must be a number above 0.*; got None"),
        ({"t4": True}, "got True"),
        ({"t4": float("nan")}, "got nan"),
        ({"t4": 10**400}, "price of t4 must be a number above 0"),
        ({"t4": 0}, "got 0"),
        ({"l4": 1}, "l4 has a price, but the cards to compare are t4, rtx-4090"),
        ({"tee4": 1}, "'tee4' is not in the card table"),
        ({"t4": 0.3, "Tesla T4": 0.4}, "t4 has two prices per hour, 0.3 and 0.4"),
    ],
)
def test_prices_that_cannot_be_are_refused_before_anything_is_traced(
    prices: Any, message: str
) -> None:
    said: list[str] = []
    with pytest.raises(InputError, match=message):
        compare(gpt2(), CARDS, prices=prices, progress=said.append)
    assert not said
