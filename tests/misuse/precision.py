"""Dtypes that change under a run, and autocast around it."""

import torch

from budgetfit import InputError, Run
from tests.misuse.case import refused, right
from tests.misuse.training import (
    applied,
    assert_trains_as_plain,
    batches,
    next_step_refused,
    step_unharmed,
    trains_as_plain,
)


@next_step_refused("is float16 .* and was float32")
def half_after_apply(run: Run) -> None:
    """model.half() after apply."""
    run.model.half()


@next_step_refused(r"1 micro-batches wait.*cast .*model.double\(\)", accumulates=True)
def double_in_a_group(run: Run) -> None:
    """model.double() between two micro-batches of an update."""
    run.model.double()


@refused("not in the run's optimizer|no longer the model's", InputError)
def meta_after_apply() -> None:
    """model.to("meta") after apply, to free memory."""
    run = applied()
    run.model.to("meta")
    run.step(batches(1)[0])


@trains_as_plain()
def moved_where_it_is(run: Run, _: object) -> None:
    """model.to("cpu") after apply, where the model is already."""
    run.model.to("cpu")


@refused("inside of torch.autocast", InputError)
def autocast_around_a_step() -> None:
    """with torch.autocast(...) around run.step of a plan in fp32."""
    with torch.autocast("cpu", torch.bfloat16):
        step_unharmed(applied())


@refused("inside of torch.autocast", InputError)
def autocast_switched_off() -> None:
    """with torch.autocast(..., enabled=False) around run.step: the same."""
    with torch.autocast("cpu", enabled=False):
        step_unharmed(applied(precision="bf16-mixed"))


@right()
def scaled_by_the_user() -> None:
    """The loss of run.step scaled by a GradScaler of the user, which finds nothing."""
    run, (batch,) = applied(), batches(1)
    scaler = torch.amp.GradScaler("cpu")
    loss = run.step(batch)
    scaler.scale(loss)
    assert_trains_as_plain([loss.item()], run.model, [[batch]])
