from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe
from budgetfit.measuring import preserve_model
from budgetfit.measuring.preserve_model import preserved_model
from tests.applying.small_models import batch_for, make

CPU = torch.device("cpu")


class Scales:
    """As bitsandbytes keeps them beside a weight."""

    def __init__(self) -> None:
        self.factors = torch.ones(2)
        self.nested = object()


def test_a_weight_that_was_packed_anew_is_as_before() -> None:
    layer = nn.Linear(4, 2, bias=False)
    weight: Any = layer.weight
    weight.quant_state = Scales()
    values, scales = weight.detach().clone(), dict(vars(weight.quant_state))
    with preserved_model(layer, CPU):
        weight.data = torch.zeros(8, 1)  # as bitsandbytes does on some CPUs
        weight.quant_state.factors = None
        weight.quant_state.packed = True
        del weight.quant_state.nested
    assert layer.weight is weight
    assert torch.equal(weight, values)
    assert vars(weight.quant_state) == scales


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
    with preserved_model(model, CPU):
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
    with pytest.raises(KeyError), preserved_model(model, CPU):  # noqa: PT012
        model.weight.data.zero_()
        raise KeyError
    assert torch.equal(model.weight, before)


def test_buffers_that_were_replaced_or_made_are_the_old_ones_again() -> None:
    model = nn.Module()
    model.register_buffer("average", torch.ones(2))
    model.register_buffer("table", None)
    average = model.average
    with preserved_model(model, CPU):
        average.add_(1)
        model.average, model.table = torch.zeros(2), torch.zeros(3)
        model.register_buffer("new", torch.zeros(1))
    assert model.average is average
    assert average.tolist() == [1.0, 1.0]
    assert model.table is None
    assert not hasattr(model, "new")


def test_what_hooks_of_modules_and_gradients_count_is_as_before() -> None:
    model, counts = nn.Sequential(nn.Linear(2, 2)), {"forward": 0, "backward": 0}
    seen: list[torch.Tensor] = []
    total = torch.zeros(2)

    def count_forward(*_: object) -> None:
        counts["forward"] += 1

    def count_backward(*_: object) -> None:
        counts["backward"] += 1

    model[0].register_forward_hook(count_forward)
    model[0].register_full_backward_hook(count_backward)
    model[0].weight.register_hook(seen.append)

    def add_to_total(bias: torch.Tensor) -> None:
        total.add_(bias.grad)

    model[0].bias.register_post_accumulate_grad_hook(add_to_total)
    with preserved_model(model, CPU, weights=False):
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        assert counts == {"forward": 1, "backward": 1}
        assert len(seen) == 1
        assert total.tolist() == [1.0, 1.0]
    assert counts == {"forward": 0, "backward": 0}
    assert not seen
    assert not total.any()


def test_gradients_of_a_model_that_the_loss_leads_to_are_as_before() -> None:
    model, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    critic.weight.grad = torch.ones(1, 2)

    def loss(outputs: torch.Tensor, _: object) -> torch.Tensor:
        return critic(outputs).sum()

    with preserved_model(model, CPU, weights=False, loss=loss):
        loss(model(torch.ones(1, 2)), None).backward()
    assert critic.weight.grad.tolist() == [[1.0, 1.0]]
    assert critic.bias.grad is None


def test_a_losss_modules_are_restored_whatever_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unlike other tensors that it leads to, which are data if they are large."""
    monkeypatch.setattr(preserve_model, "_MOST_BYTES", 0)
    critic, data = nn.Linear(2, 1, bias=False), torch.ones(2, requires_grad=True)
    weight = critic.weight.detach().clone()

    def loss(outputs: torch.Tensor, _: object) -> torch.Tensor:
        value = (critic(outputs) * data).sum()
        value.backward()
        with torch.no_grad():
            critic.weight.add_(1)
            data.add_(1)
        return value

    model = nn.Linear(2, 2)
    with preserved_model(model, CPU, loss=loss):
        loss(model(torch.ones(1, 2)), None)
    assert critic.weight.equal(weight)
    assert critic.weight.grad is None
    assert data.tolist() == [2, 2]
    assert data.grad is None


def test_hooks_that_a_forward_leaves_are_removed_with_the_note_that_it_did() -> None:
    """As of transformers where router logits are collected: else it hooks once more."""
    model = nn.Sequential(nn.Linear(4, 4))
    seen: list[int] = []

    def collect(*_: object) -> None:
        seen.append(1)

    def forward() -> int:
        seen.clear()
        if not hasattr(model, "hooked"):
            model[0].register_forward_hook(collect, always_call=True)
            model.hooked = True
        model(torch.ones(1, 4))
        return len(seen)

    own = model[0].register_forward_hook(collect)
    for _ in range(2):
        with preserved_model(model, CPU):
            assert forward() == 2
    assert not hasattr(model, "hooked")
    assert [len(vars(model[0])["_forward_hooks"]), forward()] == [1, 2]
    own.remove()
    assert forward() == 1
