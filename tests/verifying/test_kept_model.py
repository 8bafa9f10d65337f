from __future__ import annotations

import pytest
import torch
from torch import nn

from budgetfit.applying.run import Run
from budgetfit.core.recipe import Recipe
from budgetfit.verifying.kept_model import kept_as_it_was
from tests.applying.small_models import batch_for, make

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_buffers_gradients_modes_and_generators_are_as_before(
    precision: str,
) -> None:
    model = make("stack").eval()
    model.norm = nn.BatchNorm1d(16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    gradients = [item.grad for item in model.parameters()]
    ids = [id(item) for item in model.parameters()]
    generator = torch.get_rng_state()
    with kept_as_it_was(model, CPU):
        with Run(model, Recipe(batch_size=4, precision=precision)) as run:
            run.step(batch_for("stack"))
        model.norm(torch.ones(2, 16))
        model.train()
        assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [item.grad for item in model.parameters()] == gradients
    assert [id(item) for item in model.parameters()] == ids
    assert torch.equal(torch.get_rng_state(), generator)
    assert not model.head.training
    assert model.norm.training  # made after eval()


def test_an_error_restores_too() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(KeyError), kept_as_it_was(model, CPU):  # noqa: PT012
        model.weight.data.zero_()
        raise KeyError
    assert torch.equal(model.weight, before)


def test_buffers_that_were_replaced_or_made_are_the_old_ones_again() -> None:
    model = nn.Module()
    model.register_buffer("average", torch.ones(2))
    model.register_buffer("table", None)
    average = model.average
    with kept_as_it_was(model, CPU):
        average.add_(1)
        model.average, model.table = torch.zeros(2), torch.zeros(3)
        model.register_buffer("new", torch.zeros(1))
    assert model.average is average
    assert average.tolist() == [1.0, 1.0]
    assert model.table is None
    assert not hasattr(model, "new")
