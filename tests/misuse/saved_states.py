"""States of runs, loaded where they do not belong."""

import copy
from typing import Any

import torch

from budgetfit import InputError, Run
from tests.misuse.case import refused, right, unharmed
from tests.misuse.training import (
    accumulating,
    applied,
    assert_steps_as_plain,
    assert_trains_as_plain,
    batches,
)


def _trained(run: Run, kind: str = "stack") -> dict[str, Any]:
    run.step(batches(1, kind)[0])
    return copy.deepcopy(run.state_dict())


def _loaded(run: Run, state: Any) -> None:
    with unharmed(run.model):
        run.load_state_dict(state)


@refused("state of another optimizer", InputError)
def of_another_optimizer() -> None:
    """The state of a run with SGD loaded into one with AdamW."""
    _loaded(applied(optimizer="adamw_torch"), _trained(applied()))


@refused("state of another optimizer", InputError)
def of_another_optimizer_with_a_state() -> None:
    """The state of a run with AdamW loaded into one with SGD."""
    _loaded(applied(), _trained(applied(optimizer="adamw_torch")))


@right()
def in_the_middle_of_a_group() -> None:
    """A state saved between two micro-batches, loaded between two others."""
    data = batches(4)
    first = accumulating()
    losses = [first.step(batch).item() for batch in data[:3]]
    state = copy.deepcopy(first.state_dict())
    second = accumulating()
    second.step(batches(1)[0])
    second.load_state_dict(state)
    losses.append(second.step(data[3]).item())
    assert_trains_as_plain(losses, second.model, [data[:2], data[2:]])


@right()
def a_state_that_is_still_trained_on() -> None:
    """state_dict() without a copy, loaded after more steps into the same run."""
    run, data = applied(), batches(2)
    state = run.state_dict()
    losses = [run.step(data[0]).item()]
    run.load_state_dict(state, random=False)
    losses.append(run.step(data[1]).item())
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])


@right()
def loaded_into_the_model_alone() -> None:
    """model.load_state_dict(...) after apply, values only."""
    run = applied()
    state = copy.deepcopy(run.model.state_dict())
    for weight in run.model.parameters():
        torch.nn.init.zeros_(weight)
    run.model.load_state_dict(state)
    assert_steps_as_plain(run, batches(1))
