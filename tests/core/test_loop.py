"""The training loop as a value: names, settings, and what does not go together."""

import dataclasses
from typing import Any

import pytest

import budgetfit
from budgetfit.core.loop import KINDS, PLAIN, RUN, Loop, as_loop


def test_a_name_is_a_loop() -> None:
    assert budgetfit.Loop is Loop
    assert [as_loop(kind).kind for kind in KINDS] == list(KINDS)
    assert as_loop("plain") == PLAIN == Loop()
    assert as_loop(RUN) is RUN


def test_a_loop_is_frozen_and_hashable() -> None:
    assert len({Loop(), Loop(ema=True), Loop(ema=False)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Loop().ema = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "keras"}, "loop='keras' is not a training loop"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a number above zero"),
        ({"max_grad_norm": "1"}, "max_grad_norm must be a number above zero"),
        ({"evaluation_batch_size": -1}, "number of samples in a batch"),
        ({"evaluation_batch_size": 2.0}, "number of samples in a batch"),
        ({"kind": "trainer", "set_to_none": False}, "which drops the gradients itself"),
        ({"kind": "run", "ema": True}, "no setting of a Run"),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(budgetfit.InputError, match=says) as caught:
        Loop(**settings)
    assert "\n" not in str(caught.value)


def test_no_loop_at_all() -> None:
    with pytest.raises(budgetfit.InputError, match="must be a Loop or a name"):
        as_loop(3)  # type: ignore[arg-type]


def test_settings_are_described() -> None:
    loop = Loop(ema=True, max_grad_norm=1.0, set_to_none=False, evaluation_batch_size=4)
    text = loop.describe()
    for part in ("a plain loop", "EMA", "clipped to 1.0", "set_to_none", "4 samples"):
        assert part in text
