"""Batches of another structure, size, dtype or kind than the planned one."""

from typing import Any

import numpy as np
import torch
from torch import nn

import budgetfit
from budgetfit import InputError, Run
from tests.applying.small_models import batch_for
from tests.misuse.case import refused, right, unharmed, warned
from tests.misuse.training import (
    accumulating,
    applied,
    assert_same_weights,
    assert_steps_as_plain,
    assert_trains_as_plain,
    batches,
    faster,
    options_of,
    plain_losses,
    step_unharmed,
)
from tests.models import text


def _step(batch: object, run: Run | None = None) -> None:
    step_unharmed(applied() if run is None else run, batch)


def _stack_batch(**changes: Any) -> dict[str, Any]:
    return {**batches(1)[0], **changes}


@refused("unexpected keyword argument 'mask'", TypeError)
def an_unknown_key() -> None:
    """A batch with a key that the model does not take."""
    _step(_stack_batch(mask=torch.ones(4)))


@refused("There is no loss to train on.*labels in the batch", InputError)
def no_labels() -> None:
    """A text batch without labels."""
    _step({"input_ids": text(4)["input_ids"]}, applied("llama"))


@right()
def fewer_samples_than_planned() -> None:
    """A last batch of one sample."""
    assert_steps_as_plain(applied(), [*batches(1), *batches(1, samples=1)])


@refused("The batch is empty", InputError)
def no_samples() -> None:
    """A batch of zero samples, whose mean loss is nan."""
    _step(batch_for("stack", 0))


@refused("no tensor in this batch, a NoneType", InputError)
def no_batch() -> None:
    """run.step(None), from a data set that skips samples."""
    _step(None)


@refused("to match target batch_size", ValueError)
def other_numbers_of_samples_cut() -> None:
    """8 inputs with 7 labels, cut by run.parts and trained on."""
    run = applied()
    whole = batches(1, samples=8)[0]
    with unharmed(run.model):
        for part in run.parts({**whole, "labels": whole["labels"][:7]}):
            run.step(part)


class Boxes(nn.Module):
    """Takes images, and boxes of all of them without an index."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(
        self, x: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor
    ) -> torch.Tensor:
        return self.layer(x).square().mean() + 0 * boxes.sum() + 0 * classes.sum()


@right()
def images_without_boxes() -> None:
    """A micro-batch of 4 images that have no boxes, in a group with one that has."""

    def batch(boxes: int) -> dict[str, torch.Tensor]:
        return {
            "x": torch.randn(4, 8),
            "boxes": torch.zeros(boxes, 4),
            "classes": torch.zeros(boxes, dtype=torch.int64),
        }

    torch.manual_seed(0)
    model, plain = Boxes(), Boxes()
    plain.load_state_dict(model.state_dict())
    data = [batch(4), batch(0)]
    settings = options_of("stack", batch=data[0], effective_batch_size=8)
    plan = budgetfit.plan(model, **{**settings, "checkpointing": "none"})
    run = faster(budgetfit.apply(plan))
    for part in data:
        run.step(part)
    plain_losses(plain, [data])
    assert_same_weights(model, plain)


@refused("no tensor in this batch.*numpy arrays", InputError)
def numpy_arrays() -> None:
    """A batch of numpy arrays, as datasets returns without set_format("torch")."""
    _step({name: part.numpy() for name, part in batches(1)[0].items()})


@refused("no tensor in this batch.*lists of numbers", InputError)
def lists_of_numbers() -> None:
    """A batch of plain lists, as a tokenizer returns without return_tensors="pt"."""
    batch = {name: part.tolist() for name, part in text(4).items()}
    _step(batch, applied("llama"))


@refused("max_grad_norm must be a number.*one argument", InputError)
def two_arguments() -> None:
    """run.step(inputs, labels), as the model is called."""
    (batch,) = batches(1)
    run = applied()
    with unharmed(run.model):
        run.step(batch["x"], batch["labels"])


@refused("The batch is on the meta device.*Hand in", InputError)
def a_batch_without_data() -> None:
    """A batch on the meta device."""
    _step({name: part.to("meta") for name, part in batches(1)[0].items()})


@right()
def inputs_that_require_gradients() -> None:
    """Inputs that require gradients, as for an attribution."""
    run, data = applied(), batches(2)
    losses = [
        run.step({**each, "x": each["x"].clone().requires_grad_()}).item()
        for each in data
    ]
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])


@refused("backward through the graph a second time", RuntimeError)
def a_state_with_its_graph() -> None:
    """A state that carries its graph from one batch to the next."""
    run, (batch,) = applied(), batches(1)
    weight = torch.ones(16, requires_grad=True)
    carried = {**batch, "x": (batch["x"] * weight).exp()}
    run.step(carried)
    step_unharmed(run, carried)


@right()
def another_order_of_keys() -> None:
    """A batch whose keys come in another order."""
    run, (batch,) = applied(), batches(1)
    turned = dict(reversed(batch.items()))
    assert_trains_as_plain([run.step(turned).item()], run.model, [[batch]])


@right()
def a_batch_that_the_model_writes_to() -> None:
    """The same batch object in every step."""
    assert_steps_as_plain(applied(), batches(1) * 3)


@refused("num_items_in_batch", InputError)
def no_items() -> None:
    """run.step(batch, num_items_in_batch=0): the loss would be infinite."""
    step_unharmed(applied("llama"), text(4), num_items_in_batch=0)


@refused(
    "num_items_in_batch=50, and the one before .* num_items_in_batch=60", InputError
)
def items_of_each_micro_batch() -> None:
    """num_items_in_batch of each micro-batch, not of the whole update."""
    run = accumulating("llama")
    run.step(text(4), num_items_in_batch=60)
    run.step(text(4), num_items_in_batch=50)


@warned("attention_mask")
def a_tensor_that_was_not_planned() -> None:
    """An attention mask in the batch of a plan that was made without one."""
    batch = text(4)
    applied("llama").step(batch | {"attention_mask": torch.ones_like(batch["labels"])})


@warned("effective")
def half_of_the_planned_batch_size() -> None:
    """A loader of 2 samples for micro-batches of 4: updates of half the samples."""
    run = accumulating()
    for batch in batches(6, samples=2):
        run.step(batch)


@right()
def padding_everywhere() -> None:
    """Labels that are all -100: the loss is nan, as in a plain loop."""
    run = applied()
    batch = _stack_batch(labels=torch.full((4,), -100))
    assert run.step(batch).isnan()


@right()
def numpy_labels_for_the_loss_alone() -> None:
    """A batch that also has names and numbers that only the loss reads."""

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        assert "a" in batch["names"]
        return outputs.mean() * float(batch["scale"][0])

    torch.manual_seed(0)
    batch = {"input": torch.randn(4, 8), "names": list("abcd"), "scale": np.ones(2)}
    plan = budgetfit.plan(
        nn.Linear(8, 2), gpu="t4", batch=batch, batch_size=4, loss=loss
    )
    with budgetfit.apply(plan) as run:
        assert run.step(batch).isfinite()
