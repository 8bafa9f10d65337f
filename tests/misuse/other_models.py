"""Plans that meet another model than the one they were made for."""

import copy
from typing import Any

import torch
from torch import nn

import budgetfit
from budgetfit import InputError
from tests.applying.small_models import Block, Stack, batch_for, make
from tests.misuse.case import refused, right, unharmed
from tests.misuse.training import applied, apply_unharmed, options_of, plan_of


def _refused_for(model: nn.Module, kind: str = "llama", **options: Any) -> None:
    apply_unharmed(plan_of(kind, **options), model)


class SwollenBlock(Block):
    """As many weights under the same names, four times the activations."""

    def forward(
        self, hidden_states: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, float]:
        inner = torch.tanh(self.up(hidden_states))
        inner = torch.sigmoid(torch.sin(torch.exp(-inner.square())))
        return hidden_states + scale * self.down(inner), scale


@refused("SwollenBlock", InputError)
def other_class_with_the_same_names() -> None:
    """A model whose blocks have the planned names and sizes, and another forward."""
    model = make("stack")
    model.layers = nn.ModuleList(SwollenBlock(16) for _ in range(6))
    _refused_for(model, "stack")


class OtherStack(Stack):
    """The same parts, each of which runs twice."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.layers):
            x, _ = layer(hidden_states=x)
        return nn.functional.cross_entropy(self.head(x), labels)


@refused("OtherStack", InputError)
def other_class_with_the_same_blocks() -> None:
    """A model of another class, which runs the planned blocks twice."""
    _refused_for(OtherStack().train(), "stack")


@right()
def adapters_put_on_by_apply_go_with_undo() -> None:
    """A plan with method="lora" applied to a plain model twice, undone in between."""
    model = make("llama")
    names = list(model.state_dict())
    for _ in range(2):
        with budgetfit.apply(plan_of("llama", method="lora"), model) as run:
            assert run.step(batch_for("llama")).isfinite()
        assert list(model.state_dict()) == names
        assert all(weight.requires_grad for weight in model.parameters())


@refused("trains by a plan already", InputError)
def verify_while_a_run_trains() -> None:
    """verify(plan, model) of a model that trains by a plan."""
    run = applied()
    with unharmed(run.model):
        budgetfit.verify(plan_of(), run.model, batch=batch_for("stack"), device="cpu")


@right()
def plan_while_a_run_trains() -> None:
    """plan(model) of a model that trains by a plan: changes nothing, sees the model."""
    run = applied()
    before = copy.deepcopy(run.model.state_dict())
    made = budgetfit.plan(run.model, **options_of("stack"))
    assert made.estimate.allocated_bytes == plan_of().estimate.allocated_bytes
    assert all(map(torch.equal, before.values(), run.model.state_dict().values()))
    assert run.step(batch_for("stack")).isfinite()
