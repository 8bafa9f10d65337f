"""Dtypes that change under a run, and autocast around it."""

import torch

import budgetfit
from budgetfit import InputError, Run
from tests.applying.small_models import make
from tests.misuse.case import refused, right
from tests.misuse.training import (
    applied,
    apply_unharmed,
    assert_trains_as_plain,
    batches,
    faster,
    next_step_refused,
    plan_of,
    step_unharmed,
    trains_as_plain,
)


@next_step_refused("is float16 .* and was float32")
def half_after_apply(run: Run) -> None:
    """model.half() after apply."""
    run.model.half()


@next_step_refused("is bfloat16 .* and was float32", precision="bf16-mixed")
def bfloat16_after_apply(run: Run) -> None:
    """model.to(torch.bfloat16) after apply, of a plan with fp32 weights."""
    run.model.to(torch.bfloat16)


@next_step_refused("is float32 .* and was bfloat16", precision="bf16")
def float_after_apply(run: Run) -> None:
    """model.float() after apply of a plan with bf16 weights."""
    run.model.float()


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
def autocast_twice() -> None:
    """with run.autocast() around run.step: old 16-bit weights would stay in use."""
    run = applied(precision="bf16-mixed")
    with run.autocast():
        step_unharmed(run)


@refused("inside of torch.autocast", InputError)
def autocast_switched_off() -> None:
    """with torch.autocast(..., enabled=False) around run.step: the same."""
    with torch.autocast("cpu", enabled=False):
        step_unharmed(applied(precision="bf16-mixed"))


@refused("Parameter 'layers.0.up.weight' is fp16", InputError)
def half_weights_under_a_scaler() -> None:
    """A model loaded in fp16, a plan for fp16-mixed."""
    apply_unharmed(plan_of(gpu="t4", precision="fp16-mixed"), make("stack").half())


@right()
def another_dtype_than_the_planned() -> None:
    """A model loaded in bf16 for a plan with fp32 weights: cast, and given back."""
    model = make("stack").to(torch.bfloat16)
    with faster(budgetfit.apply(plan_of(), model)) as run:
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        assert run.step(batches(1)[0]).dtype == torch.float32
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@right()
def scaled_by_the_user() -> None:
    """The loss of run.step scaled by a GradScaler of the user, which finds nothing."""
    run, (batch,) = applied(), batches(1)
    scaler = torch.amp.GradScaler("cpu")
    loss = run.step(batch)
    scaler.scale(loss)
    assert_trains_as_plain([loss.item()], run.model, [[batch]])


@right()
def doubles_in_the_batch() -> None:
    """A batch of float64, as numpy makes it."""
    run, (batch,) = applied(), batches(1)
    doubles = {**batch, "x": batch["x"].double()}
    assert_trains_as_plain([run.step(doubles).item()], run.model, [[batch]])
