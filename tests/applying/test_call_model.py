import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from budgetfit.applying.loss.call_model import (
    compute_loss,
    evaluate_batch,
    model_arguments,
)
from budgetfit.errors import InputError

X, Y, MASK = torch.ones(2, 3), torch.zeros(2), torch.ones(2)


class Model(nn.Module):
    """Returns what ``output`` makes of one trained number."""

    def __init__(self, output: Callable[..., Any] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.output = output

    def forward(
        self, x: torch.Tensor, mask: object = None, labels: object = None
    ) -> Any:
        del mask, labels
        return self.output(self.weight * x)


class TakesAll(nn.Module):
    def forward(self, *parts: Any, **named: Any) -> Any:
        return parts, named


@pytest.mark.parametrize(
    ("model", "batch", "for_loss", "taken"),
    [
        (nn.Linear(3, 1), (X, Y), False, 2),  # without a loss all go to the model
        (nn.Linear(3, 1), (X, Y), True, 1),  # (inputs, targets)
        (nn.Linear(3, 1), [X], True, 1),  # an autoencoder
        (nn.Linear(3, 1), (X, Y, MASK), True, 1),
        (Model(None), (X, Y), True, 1),  # the optional mask is not the target
        (Model(None), (X, MASK, Y), True, 2),
        (nn.Bilinear(3, 3, 1), (X, X), True, 2),
        (TakesAll(), (X, MASK, Y), True, 2),
    ],
)
def test_tuples_fill_arguments_by_position_and_leave_targets_to_the_loss(
    model: nn.Module, batch: object, for_loss: bool, taken: int
) -> None:
    args, kwargs = model_arguments(model, batch, for_loss=for_loss)
    assert len(args) == taken
    assert not kwargs


def test_mappings_fill_arguments_by_name() -> None:
    batch = {"x": X, "target": Y}
    assert set(model_arguments(Model(None), batch, for_loss=True)[1]) == {"x"}
    assert set(model_arguments(Model(None), batch, for_loss=False)[1]) == set(batch)
    assert set(model_arguments(TakesAll(), batch, for_loss=True)[1]) == set(batch)


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=2
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    ],
    ids=["ddp", "compile", "both"],
)
def test_targets_stay_out_of_a_wrapped_model(wrap: Any) -> None:
    wrapped = wrap(Model(None))
    batch = {"x": X, "target": Y}
    assert set(model_arguments(wrapped, batch, for_loss=True)[1]) == {"x"}
    assert len(model_arguments(wrapped, (X, Y, MASK), for_loss=True)[0]) == 2
    wrapped = wrap(nn.Linear(3, 1))
    assert len(model_arguments(wrapped, (X, Y, MASK), for_loss=True)[0]) == 1


def test_anything_else_is_the_one_argument() -> None:
    assert model_arguments(nn.Linear(3, 1), X, for_loss=False) == ((X,), {})


@pytest.mark.parametrize(
    ("output", "batch", "expected"),
    [
        (lambda y: {"loss": y.sum(), "logits": y}, {"x": X}, 12.0),
        (lambda y: (y.sum(), y), {"x": X, "labels": Y}, 12.0),
        (lambda y: y.sum(), X, 12.0),
        (lambda y: (y.sum().double(),), X, 12.0),
    ],
)
def test_the_models_own_loss_is_found(
    output: object, batch: object, expected: float
) -> None:
    assert compute_loss(Model(output), batch, None).item() == expected


@pytest.mark.parametrize(
    ("output", "batch", "expected"),
    [
        (lambda y: y, X, 2.0),
        (lambda y: y[:1, :1], X, 2.0),  # one number for the one sample
        (lambda y: (y, {"a": 2 * y, "b": torch.arange(3)}), X, 3.0),  # of 2 and 4
        (lambda y: {"loss": None, "logits": y}, {"x": X}, 2.0),
    ],
)
def test_without_a_loss_a_plan_takes_the_mean_and_training_is_refused(
    output: object, batch: object, expected: float
) -> None:
    asked: list[bool] = []
    mean = compute_loss(
        Model(output), batch, None, on_missing_loss=lambda: asked.append(True)
    )
    assert (mean.item(), asked) == (expected, [True])
    with pytest.raises(InputError, match=r"no loss to train on.* Hand in loss="):
        compute_loss(Model(output), batch, None)


@pytest.mark.parametrize(
    ("output", "batch", "loss"),
    [
        # nanoGPT's: the first output is no scalar, or nothing says that it is the loss.
        (lambda y: (y, y.sum()), {"x": X, "labels": Y}, "outputs[1]"),
        (lambda y: (y, y.sum()), {"x": X}, "outputs[1]"),
        # torchvision's: losses by name, and what has no gradient.
        (
            lambda y: {"class": y.sum(), "box": y.mean(), "n": torch.ones(())},
            X,
            "outputs['class'] + outputs['box']",
        ),
    ],
)
def test_scalars_among_the_outputs_are_named_in_the_example(
    output: object, batch: object, loss: str
) -> None:
    with pytest.raises(InputError, match=re.escape(f"batch: {loss}.") + "$"):
        compute_loss(Model(output), batch, None)


def test_a_tuple_of_several_losses_is_warned_of_once() -> None:
    model, batch = Model(lambda y: (y.sum(), y, y, y.mean())), {"x": X, "labels": Y}
    with pytest.warns(match=r"not contain outputs\[3\]: .*outputs\[0\] \+ "):
        assert compute_loss(model, batch, None).item() == 12.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute_loss(model, batch, None)
        compute_loss(Model(lambda y: (y.sum(), y)), batch, None)


def test_outputs_with_a_loss_attribute_are_asked_for_it() -> None:
    class Output:
        def __init__(self, y: torch.Tensor) -> None:
            self.loss = y.sum()

    assert compute_loss(Model(Output), X, None).item() == 12.0


def test_a_users_loss_gets_the_outputs_and_the_whole_batch() -> None:
    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (outputs.sum(1) - batch[1]).sum()

    assert compute_loss(Model(lambda y: y), (X, Y + 1), loss).item() == 12.0 - 2.0


@pytest.mark.parametrize(
    ("output", "loss", "text"),
    [
        (lambda y: {"loss": y}, None, r"scalar tensor, got a tensor of shape \(2, 3\)"),
        (lambda y: y, lambda outputs, _: outputs.sum().item(), "got float"),
        (
            lambda y: y.detach().sum(),
            None,
            "does not depend on any trainable parameter",
        ),
        (lambda _: "text", None, "returned str without a loss"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(
    output: Any, loss: Any, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        compute_loss(Model(output), X, loss)


def test_an_evaluation_gets_the_labels_and_makes_the_loss() -> None:
    class Taking(nn.Module):
        def forward(self, **named: Any) -> Any:
            return named

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (outputs.sum(1) - batch[1]).sum()

    batch = {"x": X, "labels": Y}
    assert evaluate_batch(Taking(), batch, None) == (batch, None)
    outputs, value = evaluate_batch(nn.Linear(3, 1), (X, Y), loss)
    assert outputs.shape == (2, 1)
    assert value.item() == loss(outputs, (X, Y)).item()
