"""As many steps are traced as an optimizer takes to do all that it does."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import ParamsT

import budgetfit
from budgetfit.utils.function_name import qualified_name
from tests.models import momentum, sgd


def a_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))


class Lookahead(torch.optim.SGD):
    """Averages the weights in every fifth step."""

    def __init__(self, parameters: ParamsT) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0
        self.slow: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: object = None) -> Any:
        super().step(closure)
        self.steps += 1
        if self.steps % 5:
            return
        weights = self.param_groups[0]["params"]
        self.slow = self.slow or [each.clone() for each in weights]
        torch._foreach_lerp_(self.slow, weights, 0.5)
        torch._foreach_copy_(weights, self.slow)


class Unfreezing(torch.optim.SGD):
    """Trains the last layer, and all of them from the third step on."""

    def __init__(self, parameters: ParamsT) -> None:
        *self.waiting, weight, bias = parameters
        self.steps = 0
        super().__init__([weight, bias], lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 3:
            self.add_param_group({"params": self.waiting})
        super().step(closure)


def update_bytes(optimizer: Any, **loop: Any) -> int:
    """Return the most that is allocated in an update."""
    name = qualified_name(optimizer)
    recipe = budgetfit.Recipe(batch_size=2, precision="fp32", optimizer=name)
    batch, loss = torch.randn(2, 512), lambda outputs, _: outputs.sum()
    found = budgetfit.estimate(
        a_model(),
        recipe,
        gpu="rtx-4090",
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        **loop,
    )
    points = found.timeline.points
    return max(each.allocated_bytes for each in points if each.phase == "optimizer")


@pytest.mark.parametrize("loop", [{}, {"loop": "plain"}])
def test_a_copy_made_in_the_fifth_step(loop: dict[str, Any]) -> None:
    weights = sum(each.nbytes for each in a_model().parameters())
    assert update_bytes(Lookahead, **loop) == update_bytes(sgd, **loop) + weights


def test_parameters_added_in_the_third_step() -> None:
    at_once = update_bytes(momentum, loop="plain")
    assert update_bytes(Unfreezing, loop="plain") == at_once


def test_a_run_refuses_added_parameters_before_it_trains() -> None:
    with pytest.raises(budgetfit.InputError, match="takes further parameters"):
        update_bytes(Unfreezing)
