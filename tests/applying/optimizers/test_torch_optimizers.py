"""torch's own optimizers: traced, trained with, and refused where they cannot be."""

import math

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.applying.optimizers.factory import TORCH_ONLY, make_optimizer
from budgetfit.errors import InputError
from tests.applying.optimizers.optimizer_states import tensors_in

ON_CPU = ("step", "mu_product")  # but for ASGD's


def matrices(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(count)])


def kept_on_the_card(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of states in blocks of 512, without counts in host memory."""
    host = () if isinstance(optimizer, torch.optim.ASGD) else ON_CPU
    return sum(
        math.ceil(tensor.nbytes / 512) * 512
        for state in optimizer.state.values()
        for key, value in state.items()
        if key not in host
        for tensor in tensors_in(value)
    )


@pytest.mark.parametrize("name", TORCH_ONLY)
def test_an_estimate_has_the_states_that_a_step_leaves(name: str) -> None:
    model = matrices()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    real = make_optimizer(name, model.parameters(), device_type="cpu")
    real.step()
    found = budgetfit.estimate(
        matrices(), gpu="t4", batch=torch.zeros(2, 40), optimizer=name
    )
    assert found.at_peak_bytes["optimizer_state"] == kept_on_the_card(real)


@pytest.mark.parametrize("name", TORCH_ONLY)
def test_each_is_torchs_own_without_weight_decay_and_trains(name: str) -> None:
    model = matrices(1)
    before = model[0].weight.detach().clone()
    made = make_optimizer(name, model.parameters(), lr=0.1, device_type="cpu")
    model(torch.ones(1, 40)).sum().backward()
    made.step()
    assert type(made) is TORCH_ONLY[name]
    assert made.defaults["lr"] == 0.1
    assert not made.defaults.get("weight_decay")
    assert not torch.equal(model[0].weight, before)


def test_muon_refuses_what_is_no_matrix_and_says_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(InputError) as caught:
        budgetfit.estimate(model, gpu="t4", batch=torch.zeros(2, 4), optimizer="muon")
    text = str(caught.value)
    assert "matrices only, and 3 of the 4 trained tensors" in text
    assert "of shape (4,)" in text
    assert "--method lora" in text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lbfgs", "through a closure"),
        ("sparse_adam", "sparse gradients only"),
        ("sparseadam", "optimizer='adam'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(name: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        make_optimizer(name, matrices().parameters(), device_type="cpu")
