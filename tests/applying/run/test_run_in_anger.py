"""What a run meets in a real training: schedulers, failures, batches of any size."""

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import ParamsT
from transformers import get_scheduler

from budgetfit import Plan
from budgetfit.applying.out_of_memory.error import TrainingOutOfMemoryError
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from tests.applying.ranks.live_bytes import LiveBytes
from tests.applying.ranks.training_runs import (
    PAIRS,
    assert_same,
    batches,
    losses,
    recipe,
    start,
    without_dropout,
)
from tests.applying.small_models import make
from tests.models import counting_hook
from tests.reporting.sample_plans import sample_model, sample_plan
from tests.stateful_losses import LOSSES

FULL = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of "
    "24.00 GiB of which 1.00 GiB is free. Of the allocated memory 21.00 GiB is "
    "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
)


def raise_full(*_: object) -> None:
    raise torch.OutOfMemoryError(FULL)


def fail_once(run: Run, where: str) -> Callable[[], None]:
    """Make the next forward, backward or update run out of memory; return the end."""
    layer = run.model.get_submodule("layers.3.down")
    if where == "forward":
        handle = layer.register_forward_hook(raise_full)
    elif where == "backward":
        handle = layer.register_full_backward_hook(raise_full)
    elif where == "clipping":
        handle = run.optimizer.register_step_pre_hook(raise_full)
    else:
        handle = run.optimizer.register_step_post_hook(raise_full)
    return handle.remove


# Schedulers


@pytest.mark.parametrize("kind", ["torch", "transformers"])
def test_schedulers_of_torch_and_transformers_follow_the_updates(kind: str) -> None:
    run = start(recipe(4, 2))
    if kind == "torch":
        scheduler = LambdaLR(run.optimizer, lambda step: 1 / (1 + step))
    else:
        scheduler = get_scheduler("linear", run.optimizer, 0, 10)
    seen = []
    for batch in batches(6):
        run.step(batch)
        if run.updated:
            scheduler.step()
        seen.append((run.updated, run.steps_done))
    assert seen == [(False, 0), (True, 1), (False, 1), (True, 2), (False, 2), (True, 3)]
    rate = run.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(0.01 / 4 if kind == "torch" else 0.01 * 7 / 10)


def test_a_flush_is_an_update_too() -> None:
    run = start(recipe(4, 4))
    losses(run, batches(3))
    assert not run.updated
    run.flush()
    assert run.updated
    assert run.steps_done == 1
    run.flush()
    assert not run.updated


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_skipped_steps_are_counted_and_are_no_updates(optimizer: str) -> None:
    # A scale of 2^40 overflows fp16 until it has been halved often enough.
    run = start(recipe(precision="fp16-mixed", optimizer=optimizer))
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [item.clone() for item in run.model.parameters()]
    run.step(batches(1)[0])
    assert (run.updated, run.steps_done, run.skipped_steps) == (False, 0, 1)
    assert all(map(torch.equal, before, run.model.parameters()))
    assert run.scaler.get_scale() == 2.0**39
    while not run.updated:
        run.step(batches(1)[0])
    assert run.steps_done == 1
    assert run.skipped_steps == 40 - torch.tensor(run.scaler.get_scale()).log2().item()


# Batches of any size


def test_samples_of_a_short_last_micro_batch_count_as_much_as_others() -> None:
    (whole,) = batches(1, 14)
    small, large = (without_dropout(start(recipe(4, steps))) for steps in (4, 1))
    parts = list(small.parts(whole))
    assert [len(part["x"]) for part in parts] == [4, 4, 4, 2]
    reported = losses(small, parts)
    expected = large.step(whole).item()
    mean = sum(
        value * len(part["x"]) for value, part in zip(reported, parts, strict=True)
    )
    assert mean / 14 == pytest.approx(expected, rel=1e-5)
    assert small.updated
    assert_same(small, large, 1e-5)


def test_weights_of_micro_batches_can_be_given() -> None:
    # A loss that is a mean over the entries that are not padding.
    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (outputs.flatten() * batch["keep"]).sum() / batch["keep"].sum()

    torch.manual_seed(0)
    models = [nn.Linear(3, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    settings = recipe(4, 2, optimizer="sgd")
    small = Run(models[0], settings, loss=loss, learning_rate=1.0)
    large = Run(
        models[1],
        replace(settings, gradient_accumulation_steps=1),
        loss=loss,
        learning_rate=1.0,
    )
    keep = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0.0])
    whole = {"input": torch.randn(8, 3), "keep": keep}
    for part in small.parts(whole):
        small.step(part, weight=part["keep"].sum().item())
    large.step(whole)
    assert_same(small, large, 1e-5)


def stack_plan() -> Plan:
    batch = {"x": ((2, 16), "float32"), "labels": ((2,), "int64")}
    return sample_plan(model=sample_model(batch=batch))


def test_a_longer_batch_than_planned_is_warned_of_before_it_runs() -> None:
    run = start(recipe(4), plan=stack_plan())
    run.step(batches(1, 4)[0])
    ran = []
    run.model.register_forward_pre_hook(lambda *_: ran.append(True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"x \[5, 16\], planned \[4, 16\]"):
            run.step(batches(1, 5)[0])
    assert not ran
    run.step(batches(1, 5)[0])  # said once


class Pooled(nn.Linear):
    """Samples of any length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mean(1))


@pytest.mark.parametrize("name", LOSSES)
def test_a_longest_batch_that_runs_first_leaves_nothing_in_the_loss(name: str) -> None:
    """Its results are dropped, and so is what the loss keeps of it."""
    batch = {"x": torch.ones(2, 3, 4)}
    plan = sample_plan(model=sample_model(batch={"x": ((2, 5, 4), "float32")}))

    def losses(*, first: bool) -> list[float]:
        torch.manual_seed(0)
        model, loss = Pooled(4, 4), LOSSES[name]()
        runs = Counter[str]()
        model.register_forward_pre_hook(counting_hook(runs, "model"))
        run = Run(model, recipe(2, longest_batch_first=first), loss=loss, plan=plan)
        found = [float(run.step(batch)) for _ in range(3)]
        assert runs["model"] == 3 + first
        return found

    assert losses(first=True) == losses(first=False)


def test_parameters_without_a_gradient_are_named_after_the_first_step() -> None:
    model = make("stack")
    model.unused = nn.Linear(2, 2)
    run = Run(model, recipe(), plan=stack_plan())
    with pytest.warns(UserWarning, match=r"2 of 28 trainable .*unused\.weight") as said:
        run.step(batches(1)[0])
    run.step(batches(1)[0])
    # Heads that are used in turns: freezing them would be wrong advice.
    assert "if other batches train them" in str(said[0].message)


def second_half(parameters: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters][2:], lr=0.1)


def test_an_update_that_reaches_nothing_of_the_optimizer_passes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    options = {"optimizer": second_half, "loss": lambda _, batch: model[0](batch).sum()}
    name = f"{__name__}.second_half"
    run = Run(model, recipe(batch_size=2, steps=2, optimizer=name), **options)
    for samples in (2, 1):  # unequal, so that gradients would be scaled
        run.step(torch.ones(samples, 2))
    assert run.updated


def test_parameters_that_hooks_update_are_not_said_to_be_without_a_gradient() -> None:
    model = make("stack")

    def update(weight: torch.Tensor) -> None:
        weight.grad = None

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(model, recipe(), plan=stack_plan()).step(batches(1)[0])


# Out of memory


@pytest.mark.parametrize("where", ["forward", "backward", "clipping"])
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_losses_after_running_out_of_memory_are_those_of_a_run_where_nothing_happened(
    where: str, precision: str
) -> None:
    settings = recipe(4, 2, segments=PAIRS, precision=precision)
    data = batches(8)
    plain, run = start(settings), start(settings)
    expected = losses(plain, data)
    torch.manual_seed(5)
    found = losses(run, data[:4])
    scale = None if run.scaler is None else run.scaler.get_scale()
    found.append(run.step(data[4]).item())
    end = fail_once(run, where)
    with pytest.raises(TrainingOutOfMemoryError) as caught:
        run.step(data[5])
    end()
    assert caught.value.dropped_micro_batches == 1
    assert caught.value.weights_intact
    assert not run.updated
    assert all(item.grad is None for item in run.model.parameters())
    assert scale is None or (run.scaler and run.scaler.get_scale() == scale)
    assert run.steps_done + run.skipped_steps == 2
    found = found[:4] + losses(run, data[4:])
    assert found == expected
    assert_same(run, plain)


def test_out_of_memory_in_the_first_update_leaves_no_half_state() -> None:
    plain, run = start(), start()
    expected = losses(plain, batches(3))

    def half(optimizer: torch.optim.Optimizer, *_: object) -> None:
        first = optimizer.param_groups[0]["params"][0]
        optimizer.state[first]["step"] = torch.zeros(())
        raise_full()

    torch.manual_seed(5)
    handle = run.optimizer.register_step_pre_hook(half)
    with pytest.raises(TrainingOutOfMemoryError) as caught:
        run.step(batches(3)[0])
    handle.remove()
    assert caught.value.weights_intact
    assert not run.optimizer.state
    assert losses(run, batches(3)) == expected


def test_an_update_that_was_interrupted_half_way_is_owned_up_to() -> None:
    run = start()
    fail_once(run, "update")
    with pytest.raises(
        TrainingOutOfMemoryError, match="last state that was saved"
    ) as e:
        run.step(batches(1)[0])
    assert not e.value.weights_intact


def test_the_report_knows_where_it_happened() -> None:
    run = start(recipe(4, 2))
    run.step(batches(1)[0])
    fail_once(run, "forward")
    text = r"in the forward of layers\.3\.down, micro-batch 2 of 2: tried .* 1\.50 GiB"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        run.step(batches(1)[0])


def test_what_the_failed_step_held_is_free_when_the_error_arrives() -> None:
    run, (batch,) = start(), batches(1)
    run.step(batch)
    alive: list[weakref.ref[Any]] = []

    def note(_module: Any, _args: Any, outputs: Any) -> None:
        alive.append(weakref.ref(outputs[0]))

    run.model.get_submodule("layers.2").register_forward_hook(note)
    fail_once(run, "forward")
    gc.disable()
    try:
        with LiveBytes() as meter:
            with pytest.raises(TrainingOutOfMemoryError) as caught:
                run.step(batch)
            assert caught.value.__context__ is None
            assert alive[0]() is None
            assert meter.live_bytes == 0
    finally:
        gc.enable()


def test_other_errors_are_handed_through_as_they_are() -> None:
    run = start()
    run.model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.step(batches(1)[0])


def test_one_line_adopts_what_should_fit_and_the_training_goes_on() -> None:
    data = batches(4, 8)
    settings = recipe(8, 1)
    plain, run = (without_dropout(start(settings)) for _ in range(2))
    losses(plain, data)
    losses(run, data[:2])
    scheduler = LambdaLR(run.optimizer, lambda _: 1.0)
    end = fail_once(run, "backward")
    with pytest.raises(TrainingOutOfMemoryError) as caught:
        run.step(data[2])
    end()
    optimizer = run.optimizer
    assert caught.value.recipe is not None
    run.adopt(caught.value.recipe)
    assert (run.recipe.batch_size, run.recipe.gradient_accumulation_steps) == (4, 2)
    for batch in data[2:]:
        for part in run.parts(batch):
            run.step(part)
        assert run.updated
        scheduler.step()
    assert run.optimizer is optimizer
    assert run.steps_done == 4
    assert_same(run, plain, 1e-5)


# Other settings on the way


def test_adopted_segments_replace_those_before_and_undo_gives_back_the_plain() -> None:
    run = start(recipe(segments=(Segment(("layers.0",)),)))
    first, third = (run.model.get_submodule(f"layers.{i}") for i in (0, 3))
    assert "forward" in vars(first)
    run.adopt(recipe(segments=(Segment(("layers.3",)),)))
    assert "forward" not in vars(first)
    assert "forward" in vars(third)
    run.undo()
    assert "forward" not in vars(third)
    assert "forward" not in vars(first)


def test_segments_can_change_between_steps_without_changing_a_bit() -> None:
    plain, run = start(recipe()), start(recipe())
    expected = losses(plain, batches(4))
    torch.manual_seed(5)
    found = losses(run, batches(4)[:2])
    run.model.eval()
    run.adopt(recipe(segments=PAIRS))
    assert losses(run, batches(4)[2:]) != found
    assert found == expected[:2]
    assert_same(run, plain)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precision": "bf16"}, "cannot change its precision from 'fp32' to 'bf16'"),
        ({"optimizer": "sgd"}, "cannot change its optimizer"),
        ({"segments": (Segment(("nowhere",)),)}, "no block 'nowhere'"),
    ],
)
def test_what_cannot_be_adopted_changes_nothing(
    wrong: dict[str, Any], message: str
) -> None:
    run = start()
    before = run.recipe
    with pytest.raises(InputError, match=message):
        run.adopt(replace(before, **wrong))
    assert run.recipe == before
    assert "forward" in vars(run.model.get_submodule("layers.3"))
    run.step(batches(1)[0])


def test_nothing_is_adopted_in_the_middle_of_a_group() -> None:
    run = start(recipe(4, 2))
    run.step(batches(1)[0])
    with pytest.raises(InputError, match="1 micro-batches wait for an update"):
        run.adopt(recipe(2, 4))
    run.step(batches(1)[0])
    run.adopt(recipe(2, 4))
