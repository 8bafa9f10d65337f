"""Values that no argument takes end in one line of our own, never in a TypeError."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import budgetfit
from budgetfit import InputError, Plan
from budgetfit.api.compare import compare
from tests.api.test_arguments import NET, Net, X, plan

ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "an effective batch as text": (
        lambda: plan(effective_batch_size="4"),
        "effective_batch_size must be a whole number",
    ),
    "an effective batch in a list": (
        lambda: plan(effective_batch_size=[4]),
        "effective_batch_size must be a whole number",
    ),
    "a list as engine": (lambda: plan(engine=[]), r"\[\] is no engine. Use engine="),
    "frames as text": (
        lambda: plan(frames="2", batch=None),
        "frames must be a whole number",
    ),
    "a number as progress": (lambda: plan(progress=5), "progress must be a function"),
    "half a pattern": (
        lambda: plan(method="lora", target_modules="("),
        "is no regular expression: missing",
    ),
    "a block itself": (
        lambda: plan(checkpointing=[NET.layers[0]]),
        "is not a block of this model",
    ),
    "a number of cards": (lambda: compare(NET, 5, batch=X), "Name the cards"),  # type: ignore[arg-type]
    "a number of methods": (
        lambda: compare(NET, ["t4"], methods=5, batch=X),  # type: ignore[arg-type]
        "methods must be some of",
    ),
    "a list of lists": (
        lambda: compare(NET, ["t4"], methods=[[]], batch=X),  # type: ignore[list-item]
        "methods must be some of",
    ),
    "a vast learning rate": (
        lambda: budgetfit.apply(plan(), Net(), learning_rate=10**400),
        "learning_rate must be a number above 0",
    ),
    "a number as loss": (
        lambda: budgetfit.apply(plan(), Net(), loss=5),  # type: ignore[arg-type]
        "loss must be a function",
    ),
    "a loss of torch": (
        lambda: budgetfit.apply(plan(), Net(), loss=nn.MSELoss()),
        "takes a target, and a loss here takes the batch",
    ),
    "hours of nothing": (lambda: plan().hours(None), "samples must be a whole number"),
    "why of a block itself": (
        lambda: plan().why(NET.layers[0]),
        "is not a block of this plan",
    ),
    "no text": (lambda: Plan.from_json(None), "This is not a saved plan"),  # type: ignore[arg-type]
    "a dict": (lambda: Plan.from_json({}), "This is not a saved plan"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_value_is_refused_in_one_line(case: str) -> None:
    call, message = ODD[case]
    with pytest.raises(InputError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_cards_and_methods_may_be_an_iterator() -> None:
    rows, _ = compare(NET, iter(["t4"]), methods=iter(["full"]), batch=X, batch_size=2)  # type: ignore[arg-type]
    assert [row.gpu.name for row in rows] == ["t4"]
