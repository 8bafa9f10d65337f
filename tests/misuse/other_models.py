"""Plans that meet another model than the one they were made for."""

import copy
from typing import Any

import torch
from torch import nn

import budgetfit
from budgetfit import InputError
from tests.applying.small_models import Block, Stack, batch_for, make
from tests.misuse.case import refused, right, unharmed
from tests.misuse.training import (
    applied,
    apply_unharmed,
    options_of,
    plan_of,
    variant,
)


def _refused_for(model: nn.Module, kind: str = "llama", **options: Any) -> None:
    apply_unharmed(plan_of(kind, **options), model)


@refused("attention sdpa, 2 heads.*not sdpa, 4 heads", InputError)
def other_heads() -> None:
    """A plan for 4 attention heads, a model with 2."""
    _refused_for(
        variant("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    )


@refused("attention eager.*not sdpa", InputError)
def other_attention() -> None:
    """A plan for sdpa, a model with eager attention."""
    _refused_for(variant("llama", attention="eager"))


@refused("parameters, not", InputError)
def other_width() -> None:
    """A plan for another hidden size."""
    _refused_for(variant("llama", hidden_size=64))


@refused("has no block 'model.layers.4'", InputError)
def fewer_layers() -> None:
    """A model with fewer layers than were planned."""
    _refused_for(variant("llama", num_hidden_layers=4))


@refused("parameters, not", InputError)
def more_layers() -> None:
    """A model with more layers than were planned."""
    _refused_for(variant("llama", num_hidden_layers=7))


@refused("parameters, not", InputError)
def other_vocabulary() -> None:
    """A model whose embeddings were resized for new tokens after it was planned."""
    model = make("llama")
    model.resize_token_embeddings(72, mean_resizing=False)
    _refused_for(model)


@refused("has no block", InputError)
def other_architecture() -> None:
    """A plan of Llama, a GPT-2."""
    _refused_for(make("gpt2"))


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


@refused("trains 16 parameters, not|trains .* parameters, not", InputError)
def frozen_after_planning() -> None:
    """A plan of a model that trains whole, its embeddings frozen since."""
    model = make("llama")
    model.get_input_embeddings().requires_grad_(requires_grad=False)
    _refused_for(model)


@refused("trains .* parameters, not", InputError)
def unfrozen_after_planning() -> None:
    """A plan of a model with frozen layers, all of them unfrozen since."""
    model = make("stack")
    model.layers.requires_grad_(requires_grad=False)
    plan = budgetfit.plan(model, **options_of("stack", checkpointing="none"))
    model.requires_grad_()
    with unharmed(model):
        budgetfit.apply(plan)


def _with_lora(model: nn.Module, rank: int = 4) -> nn.Module:
    import peft  # noqa: PLC0415 - slow

    config = peft.LoraConfig(r=rank, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)  # type: ignore[no-any-return]


@refused("this model has|has no block", InputError)
def full_plan_for_adapters() -> None:
    """A plan of the whole model applied to that model with LoRA on it."""
    _refused_for(_with_lora(make("llama")))


@refused("has no block|trains", InputError)
def adapters_plan_for_the_full_model() -> None:
    """A plan of a live model with adapters applied to its base."""
    adapted = _with_lora(make("llama"))
    plan = budgetfit.plan(adapted, **options_of("llama")).changed(source=None)
    apply_unharmed(plan, make("llama"))


@refused("parameters, not", InputError)
def adapters_of_another_rank() -> None:
    """A plan for adapters of rank 16, a model that has some of rank 4."""
    _refused_for(_with_lora(make("llama")), method="lora")


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


@refused("parameters, not", InputError)
def untied_embeddings() -> None:
    """A plan of a model with tied embeddings, applied to one without."""
    _refused_for(variant("gpt2", tie_word_embeddings=False), "gpt2")


@refused("parameters, not|has no block", InputError)
def a_wrapper_of_the_model() -> None:
    """A plan applied to nn.Sequential(model)."""
    _refused_for(nn.Sequential(make("stack")), "stack")


@refused("meta device", InputError)
def a_model_without_weights() -> None:
    """A plan applied to a model on the meta device."""
    _refused_for(make("stack").to("meta"), "stack")


@refused("parameters, not|this model", InputError)
def verify_with_another_model() -> None:
    """verify(plan, model) with a model of another size."""
    model = variant("llama", hidden_size=64)
    with unharmed(model):
        budgetfit.verify(plan_of("llama"), model, device="cpu")


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


@refused("A Plan is expected, not a Stack", InputError)
def arguments_swapped() -> None:
    """apply(model, plan)."""
    model = make("stack")
    with unharmed(model):
        budgetfit.apply(model, plan_of())  # type: ignore[arg-type]


@refused("A Plan is expected, not a Recipe", InputError)
def a_recipe_for_a_plan() -> None:
    """apply(plan.recipe, model)."""
    apply_unharmed(plan_of().recipe)  # type: ignore[arg-type]


@refused("A Plan is expected, not a Estimate", InputError)
def an_estimate_for_a_plan() -> None:
    """apply(estimate, model)."""
    apply_unharmed(plan_of().estimate)  # type: ignore[arg-type]


@refused("must be a torch.nn.Module, not a type", InputError)
def a_class_for_a_model() -> None:
    """apply(plan, Model) with the class, not an instance."""
    budgetfit.apply(plan_of(), Stack)  # type: ignore[arg-type]


@refused("no model with weights to train", InputError)
def no_model() -> None:
    """A loaded plan applied without a model."""
    budgetfit.apply(plan_of())
