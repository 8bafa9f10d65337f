"""Plans inside of other libraries' loops, with other settings than planned."""

import tempfile
from typing import Any

import transformers
from torch import nn

import budgetfit
from budgetfit import InputError
from tests.applying.small_models import make
from tests.integrations.tiny_training import Samples, plan_for, tiny_model
from tests.misuse.case import refused, right, unharmed
from tests.misuse.training import (
    applied,
    assert_same_weights,
    batches,
    faster,
    options_of,
    plain_losses,
    plan_of,
)
from tests.models import text


def _train(
    model: nn.Module, plan: budgetfit.Plan, callback: Any = None, **changes: Any
) -> transformers.Trainer:
    """Train for one step with the plan's callback and other arguments."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            **{
                **plan.to_training_arguments(),
                "output_dir": folder,
                "max_steps": 1,
                "report_to": [],
                "save_strategy": "no",
                "use_cpu": True,
                **changes,
            }
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=Samples(),
            callbacks=[plan.trainer_callback() if callback is None else callback],
        )
        trainer.train()
    return trainer


@refused("trains by a plan already", InputError)
def trainer_beside_a_run() -> None:
    """A Trainer with the plan's callback for a model that trains by apply."""
    run = applied("llama")
    _train(run.model, plan_of("llama"))


@right()
def trainer_twice_with_one_callback() -> None:
    """One callback for two Trainers, one after the other."""
    model = tiny_model("llama")
    plan = plan_for(model)
    callback = plan.trainer_callback()
    names = {name: vars(module) for name, module in model.named_modules()}
    for _ in range(2):
        _train(model, plan, callback)
    assert all("forward" not in attributes for attributes in names.values())


@right()
def prepared_and_trained_in_a_loop() -> None:
    """plan.prepare(model) in a loop, undone only at the end."""
    model, data = make("stack"), batches(3)
    with plan_of().prepare(model):
        losses = plain_losses(model, [[batch] for batch in data])
    plain = make("stack")
    assert plain_losses(plain, [[batch] for batch in data]) == losses
    assert_same_weights(model, plain)


@refused("trains .* has no adapters", InputError)
def prepared_without_adapters() -> None:
    """plan.prepare(model) of a plan for LoRA on a model without adapters."""
    model = make("llama")
    with unharmed(model):
        plan_of("llama", method="lora").prepare(model)


@refused("optimizer_in_backward|inside the backward", InputError)
def lightning_with_an_optimizer_in_backward() -> None:
    """plan.to_lightning_arguments() of a plan whose optimizer steps in backward."""
    plan_of(optimizer_in_backward=True).to_lightning_arguments()


@right()
def a_prefix_in_the_cache() -> None:
    """Prefix tuning, which hands keys to blocks in the cache."""
    _assert_prefix_trains(checkpointing="auto")


@right()
def a_prefix_and_recomputation() -> None:
    """Prefix tuning with checkpointing="full"."""
    _assert_prefix_trains(checkpointing="full")


def _assert_prefix_trains(checkpointing: str) -> None:
    import peft

    models = []
    for _ in range(2):
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        models.append(peft.get_peft_model(make("llama"), config))
    models[1].load_state_dict(models[0].state_dict())
    batch = text(4)
    options = options_of("llama", checkpointing=checkpointing)
    run = faster(budgetfit.apply(budgetfit.plan(models[0], **options)))
    loss = run.step(batch).item()
    assert plain_losses(models[1], [[batch]]) == [loss]
    assert_same_weights(models[0], models[1])
