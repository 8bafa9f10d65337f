"""Losses that are none."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import budgetfit
from budgetfit import InputError
from tests.misuse.case import refused, right, warned
from tests.misuse.training import options_of, step_unharmed
from tests.models import squares

BATCH = {"input": torch.ones(4, 8)}


def _plan(loss: object, model: nn.Module | None = None) -> budgetfit.Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)) if model is None else model
    return budgetfit.plan(model, **options_of("stack", batch=BATCH, loss=loss))


def _later(loss: Callable[[torch.Tensor], object]) -> None:
    """Train with a loss that was a good one while it was planned."""

    def changing(outputs: torch.Tensor, _: object) -> Any:
        return loss(outputs) if trains else outputs.mean()

    trains = False
    run = budgetfit.apply(_plan(changing))
    trains = True
    step_unharmed(run, BATCH)


@refused("must be a scalar tensor, got a tensor of shape", InputError)
def a_vector_later() -> None:
    """A loss that becomes a vector while training."""
    _later(lambda outputs: outputs.square())


@refused("nothing would train", InputError)
def detached_later() -> None:
    """A loss that is a constant for some batches."""
    _later(lambda _: torch.zeros(()))


@refused("the user's", KeyError)
def an_error_in_the_loss() -> None:
    """An error inside of the user's loss."""

    def fail(_: torch.Tensor) -> object:
        raise KeyError("the user's")

    _later(fail)


@refused("There is no loss to train on", InputError)
def no_loss() -> None:
    """A model without a loss, planned by the mean of its outputs, then trained."""
    run = budgetfit.apply(_plan(None))
    step_unharmed(run, BATCH)


@refused("There is no loss to train on", InputError)
def no_loss_verified() -> None:
    """A model without a loss, verified."""
    budgetfit.verify(_plan(None), device="cpu")


@warned("made for loss=.*, and .*squares was handed in")
def another_loss() -> None:
    """apply(plan, model, loss=...) with another loss than the planned one."""

    def planned(outputs: torch.Tensor, _: object) -> torch.Tensor:
        return outputs.mean()

    run = budgetfit.apply(_plan(planned), loss=squares)
    assert run.step(BATCH).isfinite()


@right()
def a_loss_with_a_state() -> None:
    """A loss that counts its calls: called once in every step."""
    counter = itertools.count()

    def loss(outputs: torch.Tensor, _: object) -> torch.Tensor:
        next(counter)
        return outputs.mean()

    run = budgetfit.apply(_plan(loss))
    before = next(counter)
    run.step(BATCH)
    run.step(BATCH)
    assert next(counter) == before + 3


class Criterion(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, _: object) -> torch.Tensor:
        return (outputs * self.scale).mean()


@warned("loss.*trainable")
def a_loss_that_trains() -> None:
    """A loss with parameters of its own, which no optimizer has."""
    run = budgetfit.apply(_plan(Criterion()))
    run.step(BATCH)
    run.step(BATCH)
