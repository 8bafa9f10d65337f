"""Plans inside of other libraries' loops, with other settings than planned."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from typer.testing import CliRunner

import budgetfit
from budgetfit import InputError
from budgetfit.cli.app import app
from tests.applying.small_models import make
from tests.integrations.tiny_training import Samples, plan_for, tiny_model
from tests.misuse.case import refused, right, unharmed, warned
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
    model: nn.Module,
    plan: budgetfit.Plan,
    callback: Any = None,  # noqa: ANN401
    **changes: Any,
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


@warned(r"per_device_train_batch_size=5 \(planned: 3\)")
def trainer_with_another_batch_size() -> None:
    """TrainingArguments with another batch size than the plan's."""
    model = tiny_model("llama")
    _train(model, plan_for(model), per_device_train_batch_size=5)


@warned(r"gradient_accumulation_steps=1 \(planned: 2\)")
def trainer_without_accumulation() -> None:
    """TrainingArguments with another gradient accumulation."""
    model = tiny_model("llama")
    _train(model, plan_for(model), gradient_accumulation_steps=1)


@warned(r"bf16=True \(planned: False\)")
def trainer_with_another_precision() -> None:
    """TrainingArguments(bf16=True) for a plan in fp32."""
    model = tiny_model("llama")
    _train(model, plan_for(model), bf16=True)


@warned(r"optim=adamw_torch \(planned: sgd\)")
def trainer_with_another_optimizer() -> None:
    """TrainingArguments(optim="adamw_torch") for a plan with SGD."""
    model = tiny_model("llama")
    _train(model, plan_for(model, optimizer="sgd"), optim="adamw_torch")


@right()
def trainer_with_its_own_checkpointing() -> None:
    """TrainingArguments(gradient_checkpointing=True): still the plan's blocks."""
    model = tiny_model("llama")
    plan = plan_for(model)
    plain = tiny_model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _train(model, plan, gradient_checkpointing=True, seed=1)
        _train(plain, plan, seed=1)
    assert_same_weights(model, plain)


@refused("this model has", InputError)
def trainer_with_another_model() -> None:
    """The callback of a plan of another model."""
    other = tiny_model("gpt2")
    with unharmed(other):
        _train(other, plan_for(tiny_model("llama")))


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


@refused("has no argument 'batch_sise'", InputError)
def a_mistyped_argument() -> None:
    """to_training_arguments(batch_sise=8)."""
    plan_of("llama").to_training_arguments(batch_sise=8)


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
def an_unknown_target() -> None:
    """budgetfit export plan.json --to keras: the targets are named, exit code 2."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan_of().save(path)
        result = CliRunner().invoke(app, ["export", str(path), "--to", "keras"])
    assert result.exit_code == 2, result.output
    assert "trainer" in result.output
    assert "deepspeed" in result.output


@right()
def a_prefix_in_the_cache() -> None:
    """Prefix tuning, which hands keys to blocks in the cache."""
    _assert_prefix_trains(checkpointing="auto")


@right()
def a_prefix_and_recomputation() -> None:
    """Prefix tuning with checkpointing="full"."""
    _assert_prefix_trains(checkpointing="full")


def _assert_prefix_trains(checkpointing: str) -> None:
    import peft  # noqa: PLC0415 - slow

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
