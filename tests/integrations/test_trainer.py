"""A plan handed to transformers' Trainer is what the Trainer trains."""

import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch.optim import SGD, AdamW

import budgetfit
from budgetfit.core.adapter import Adapter
from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.integrations.exports import trainer as trainer_module
from budgetfit.integrations.exports.trainer_arguments import planned_arguments
from tests import models
from tests.integrations.tiny_training import (
    ACCUMULATION,
    BATCH_SIZE,
    KINDS,
    LENGTH,
    PRODUCTS,
    QUIET_ARGUMENTS,
    STEPS,
    VOCABULARY,
    Samples,
    blocks_of,
    count_block_runs,
    defined_by,
    losses_of,
    make_quiet,
    mixed_segments,
    plan_for,
    runs,
    tiny_model,
)
from tests.zoo.state import assert_same

pytest.importorskip("accelerate")  # the Trainer needs it


def arguments(plan: Plan, folder: Path, **overrides: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        **plan.to_training_arguments(**QUIET_ARGUMENTS | overrides),
    )


def trained(
    model: nn.Module, args: object, *callbacks: Any, **options: Any
) -> list[float]:
    """Train three steps and return their losses."""
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=Samples(),
        callbacks=list(callbacks),
        **options,
    )
    return losses_of(trainer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_recomputes_exactly_the_planned_blocks(
    kind: str, tmp_path: Path
) -> None:
    model = tiny_model(kind)
    plan = plan_for(model)
    keys = list(model.state_dict())
    expected = trained(tiny_model(kind), arguments(plan, tmp_path))
    counts = count_block_runs(model)
    losses = trained(model, arguments(plan, tmp_path), plan.trainer_callback())
    assert runs(counts) == [2, 1, 2, 1]
    assert losses == expected
    assert len(losses) == STEPS
    assert list(model.state_dict()) == keys


def test_a_batch_that_is_longer_than_planned_is_warned_of(tmp_path: Path) -> None:
    model = tiny_model(KINDS[0])
    plan = plan_for(model)
    shorter = {
        name: ((BATCH_SIZE, LENGTH - 1), kind)
        for name, (_, kind) in plan.model.batch.items()
    }
    plan = replace(plan, model=replace(plan.model, batch=shorter))
    said = rf"input_ids \[{BATCH_SIZE}, {LENGTH}\], planned \[{BATCH_SIZE}, "
    with pytest.warns(UserWarning, match=f"larger than the plan's: .*{said}") as caught:
        trained(model, arguments(plan, tmp_path), plan.trainer_callback())
    assert sum("larger than the plan's" in str(each.message) for each in caught) == 1
    assert not model._forward_pre_hooks


def test_what_is_generated_while_training_is_no_larger_batch(tmp_path: Path) -> None:
    model = tiny_model(KINDS[0])
    plan = plan_for(model)

    class Generating(transformers.TrainerCallback):
        """As TRL's GRPOTrainer: more prompts than planned, in training mode."""

        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            ids = torch.ones(2 * BATCH_SIZE, LENGTH, dtype=torch.long)
            with torch.no_grad():
                model.train()(input_ids=ids)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*larger than the plan's")
        trained(model, arguments(plan, tmp_path), plan.trainer_callback(), Generating())


def test_a_model_can_be_pickled_while_it_trains(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plan = plan_for(model)

    class Saving(transformers.TrainerCallback):
        """As ``torch.save(model, path)``."""

        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            copied = pickle.loads(pickle.dumps(model))
            assert_same(model.state_dict(), copied.state_dict())

    trained(model, arguments(plan, tmp_path), plan.trainer_callback(), Saving())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_segments_of_every_mode_train_as_the_plain_trainer(
    kind: str, precision: str, tmp_path: Path
) -> None:
    model = tiny_model(kind)
    plan = plan_for(model, mixed_segments(model), precision=precision)
    expected = trained(tiny_model(kind), arguments(plan, tmp_path))
    counts = count_block_runs(model)
    losses = trained(model, arguments(plan, tmp_path), plan.trainer_callback())
    assert runs(counts) == [2, 2, 2, 1]
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_a_plan_with_torch_compile_is_compiled_in_the_trainer_and_undone(
    compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    plan = plan_for(model, compile=compiled)
    expected = trained(tiny_model("llama"), arguments(plan, tmp_path))
    before = how_blocks_are_called(model)
    forwards, made, happened = [], [], []

    def backend(graph: Any, _: object) -> Any:
        made.append(graph)
        return graph.forward

    compile_with = torch.compile

    def counted(forward: Any, **options: Any) -> Any:
        forwards.append(forward)
        return compile_with(forward, dynamic=options["dynamic"], backend=backend)

    class Notes(transformers.TrainerCallback):
        def on_optimizer_step(self, *_: object, **__: object) -> None:
            happened.append("updates")

    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("empties"))
    callbacks = plan.trainer_callback(), Notes()
    losses = trained(model, arguments(plan, tmp_path), *callbacks)
    assert losses == pytest.approx(expected, rel=1e-5)
    emptied = ["empties"] * (1 if compiled == "blocks" else 2)
    assert happened == [*emptied, *["updates"] * STEPS]  # two micro-batches in each
    assert len(forwards) == (4 if compiled == "blocks" else 1)
    assert len(made) == 1  # equal blocks share their code
    assert how_blocks_are_called(model) == before
    torch._dynamo.reset()


def test_the_model_is_plain_again_after_training_and_after_an_error(
    tmp_path: Path,
) -> None:
    model = tiny_model("llama")
    plan = plan_for(model, mixed_segments(model))
    before = how_blocks_are_called(model)

    trained(model, arguments(plan, tmp_path), plan.trainer_callback())
    assert how_blocks_are_called(model) == before

    class Breaks(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            raise RuntimeError("broken")

    callback = plan.trainer_callback()
    with pytest.raises(RuntimeError, match="broken"):
        trained(model, arguments(plan, tmp_path), callback, Breaks())
    assert how_blocks_are_called(model) != before
    callback.undo()
    assert how_blocks_are_called(model) == before


def how_blocks_are_called(model: nn.Module) -> dict[str, tuple[object, ...]]:
    names = ("forward", "gradient_checkpointing", "_gradient_checkpointing_func")
    return {
        path: tuple(vars(module).get(name) for name in names)
        for path, module in model.named_modules()
    }


def test_checkpointing_that_is_asked_of_the_trainer_does_not_reset_the_plan(
    tmp_path: Path,
) -> None:
    """``activation_checkpointing=True`` would recompute every block."""
    model = tiny_model("llama")
    plan = plan_for(model)
    counts = count_block_runs(model)
    args = arguments(plan, tmp_path, activation_checkpointing=True)
    trained(model, args, plan.trainer_callback())
    assert runs(counts) == [2, 1, 2, 1]


def test_checkpointing_that_is_switched_during_training_is_put_right(
    tmp_path: Path,
) -> None:
    class SwitchesOn(transformers.TrainerCallback):
        def on_step_end(self, *_: object, model: Any = None, **__: object) -> None:
            model.activation_checkpointing_enable()

    model = tiny_model("llama")
    plan = plan_for(model)
    counts = count_block_runs(model)
    with pytest.warns(UserWarning, match="planned blocks are recomputed again"):
        trained(model, arguments(plan, tmp_path), SwitchesOn(), plan.trainer_callback())
    assert runs(counts) == [2, 1, 2, 1]


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_in_chunks_are_those_of_the_plain_trainer(
    kind: str, precision: str, tmp_path: Path
) -> None:
    model = tiny_model(kind)
    plan = plan_for(model, loss_chunks=4, precision=precision)
    expected = trained(tiny_model(kind), arguments(plan, tmp_path))
    positions: list[int] = []
    head = model.get_submodule("lm_head")
    plain = head.forward

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        positions.append(hidden[..., 0].numel())
        return plain(hidden)

    head.forward = watched

    losses = trained(model, arguments(plan, tmp_path), plan.trainer_callback())

    # Sums in another order: bf16 has 8 bits.
    tolerance = 1e-6 if precision == "fp32" else 1e-4
    assert losses == pytest.approx(expected, rel=tolerance)
    assert set(positions) == {BATCH_SIZE * LENGTH // 4}  # of one part
    assert head.forward is watched


@pytest.mark.filterwarnings("ignore:Training with label_smoothing_factor")
def test_label_smoothing_is_refused_where_the_loss_is_cut(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plan = plan_for(model, loss_chunks=4)
    args = arguments(plan, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(InputError, match="cannot be cut into parts"):
        trained(model, args, plan.trainer_callback())


def test_weights_get_the_planned_dtype_before_the_optimizer_and_keep_it(
    tmp_path: Path,
) -> None:
    model = tiny_model("llama").to(torch.bfloat16)  # as from_pretrained loads it
    plan = plan_for(model, precision="bf16-mixed")

    callback = plan.trainer_callback()
    trainer = transformers.Trainer(
        model=model,
        args=arguments(plan, tmp_path),
        train_dataset=Samples(),
        callbacks=[callback],
    )
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_pure_bf16_trains_and_gives_exact_buffers_back(tmp_path: Path) -> None:
    model = tiny_model("llama")
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    plan = plan_for(model, precision="bf16")
    args = arguments(plan, tmp_path)
    losses = trained(model, args, plan.trainer_callback())
    assert not args.bf16
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert all(2 < loss < 6 for loss in losses)  # around ln(64) = 4.16
    for name, each in model.named_buffers():
        assert each.dtype == buffers[name].dtype
        assert torch.equal(each, buffers[name])


@pytest.mark.parametrize("compiled", ["none", "model"])
def test_floating_point_inputs_of_a_bf16_model_are_cast(
    compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    plan = plan_for(tiny_model("llama"), (), precision="bf16", compile=compiled)
    count = sum(parameter.numel() for parameter in model.parameters())
    described = replace(
        plan.model,
        parameter_count=count,
        trainable_count=count,
        blocks=(),
        batch={},
        attention="",
    )
    plan = replace(plan, model=described)

    prepared = plan.prepare(model)
    for restored in (False, True):
        model(torch.ones(1, 4)).sum().backward()
        model[0].forward = model[0].forward  # as others set it
        assert prepared.restore() is not restored
    assert {each.grad.dtype for each in model.parameters()} == {torch.bfloat16}
    prepared.undo()
    assert "forward" not in vars(model)


def test_training_resumes_with_the_planned_dtype(tmp_path: Path) -> None:
    """A state that is loaded before the weights are cast would be cast with them."""
    model = tiny_model("llama").to(torch.bfloat16)
    plan = plan_for(model, precision="bf16-mixed")
    saving = {"save_strategy": "steps", "save_steps": 2}
    expected = trained(
        model, arguments(plan, tmp_path, **saving), plan.trainer_callback()
    )
    again = tiny_model("llama").to(torch.bfloat16)
    trainer = transformers.Trainer(
        model=again,
        args=arguments(plan, tmp_path, **saving),
        train_dataset=Samples(),
        callbacks=[plan.trainer_callback()],
    )
    trainer.remove_callback(transformers.PrinterCallback)

    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses == expected


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("fp32", (False, False)),
        ("as-is", (False, False)),
        ("bf16", (False, False)),
        ("bf16-mixed", (True, False)),
        ("fp16-mixed", (False, True)),
    ],
)
def test_the_arguments_are_the_plans(
    precision: str, flags: tuple[bool, bool], tmp_path: Path
) -> None:
    """Samples per optimizer step are those that were asked for."""
    plan = plan_for(tiny_model("gpt2"), precision=precision)
    args = arguments(plan, tmp_path)
    assert (args.bf16, args.fp16) == flags
    assert args.per_device_train_batch_size == BATCH_SIZE
    assert args.gradient_accumulation_steps == ACCUMULATION
    assert args.optim == "adamw_torch"
    assert args.gradient_checkpointing is False
    assert args.dataloader_drop_last is False


def test_the_planned_evaluation_batch_is_handed_on(tmp_path: Path) -> None:
    """Evaluation runs out of memory where training does not."""
    plan = plan_for(tiny_model("gpt2"))
    plan = replace(plan, estimate=replace(plan.estimate, eval_batch_size=17))
    assert arguments(plan, tmp_path).per_device_eval_batch_size == 17
    plan = replace(plan, estimate=replace(plan.estimate, eval_batch_size=52_558))
    assert arguments(plan, tmp_path).per_device_eval_batch_size == 1024
    none_fits = replace(plan, estimate=replace(plan.estimate, eval_batch_size=0))
    assert arguments(none_fits, tmp_path).per_device_eval_batch_size == 1


def test_only_arguments_that_the_class_has_are_used() -> None:
    """The names of checkpointing changed in transformers 5.23."""
    planned = plan_for(tiny_model("gpt2")).to_training_arguments()
    old = {name for name in planned if name != "activation_checkpointing"}
    old |= {"gradient_checkpointing"}
    made = planned_arguments(plan_for(tiny_model("gpt2")), old, {})
    assert planned["activation_checkpointing"] is False
    assert "gradient_checkpointing" not in planned
    assert made["gradient_checkpointing"] is False


def test_an_argument_that_is_not_there_is_named() -> None:
    plan = plan_for(tiny_model("gpt2"))
    with pytest.raises(InputError, match="no argument 'learning_rat'"):
        plan.to_training_arguments(learning_rat=1)


def test_a_function_as_optimizer_is_built_by_the_plan(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    plan = plan_for(model, optimizer="torch.optim.sgd.SGD")
    with pytest.raises(InputError, match=r"no optimizer 'torch\.optim\.sgd\.SGD'"):
        plan.to_training_arguments()
    assert arguments(plan, tmp_path, optim="sgd").optim == "sgd"
    with pytest.raises(InputError, match=r"only names\. Call it yourself"):
        plan.make_optimizer(model.parameters())


def test_an_optimizer_that_steps_in_backward_is_built_by_the_plan(
    tmp_path: Path,
) -> None:
    model = tiny_model("llama")
    plan = plan_for(model, gradient_accumulation_steps=1, optimizer_in_backward=True)
    with pytest.raises(InputError, match="after the backward pass, and it was planned"):
        plan.to_training_arguments()
    args = arguments(plan, tmp_path, optim="adamw_torch")
    plain = plan_for(model, gradient_accumulation_steps=1)
    expected = trained(
        tiny_model("llama"), arguments(plain, tmp_path, max_grad_norm=0.0)
    )
    optimizer = plan.make_optimizer(model.parameters())

    losses = trained(model, args, plan.trainer_callback(), optimizers=(optimizer, None))

    assert args.max_grad_norm == 0.0
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("export", ["to_lightning_arguments", "to_deepspeed_config"])
def test_a_library_that_steps_later_refuses_it(export: str) -> None:
    plan = plan_for(
        tiny_model("gpt2"), gradient_accumulation_steps=1, optimizer_in_backward=True
    )
    with pytest.raises(InputError, match="the plan's steps inside it"):
        getattr(plan, export)()


@pytest.mark.filterwarnings("ignore:This batch is larger")  # it is, in the first case
@pytest.mark.parametrize(
    ("name", "value", "planned"),
    [
        ("per_device_train_batch_size", 6, "3"),
        ("gradient_accumulation_steps", 1, "2"),
        ("bf16", True, "False"),
        ("optim", "adamw_torch", "sgd"),
        ("label_smoothing_factor", 0.1, "0.0"),
    ],
)
def test_other_settings_than_the_planned_ones_are_warned_about(
    tmp_path: Path, name: str, value: object, planned: str
) -> None:
    model = tiny_model("gpt2")
    plan = plan_for(model, optimizer="sgd")
    args = arguments(plan, tmp_path, **{name: value})
    message = rf"{name}={value} \(planned: {planned}\): the plan's prediction"
    with pytest.warns(UserWarning, match=message):
        trained(model, args, plan.trainer_callback())


@pytest.mark.parametrize(
    ("planned", "own", "said"),
    [
        ("sgd", SGD, ""),
        # A copy of all gradients: 103.3 instead of 74.3 MiB in 29 MiB of layers.
        ("sgd", partial(SGD, weight_decay=0.1), r"weight_decay=0.1 \(planned: 0\)"),
        ("sgd", partial(SGD, momentum=0.9), r"momentum=0.9 \(planned: 0\)"),
        ("sgd", AdamW, r"AdamW \(planned: SGD\)"),
        ("adamw_torch", AdamW, ""),
        ("adamw_torch", partial(AdamW, betas=(0.8, 0.9)), ""),
        ("adamw_torch", partial(AdamW, weight_decay=0.1), ""),
        ("adamw_torch", partial(AdamW, amsgrad=True), r"amsgrad=True \(.*False\)"),
    ],
)
def test_an_optimizer_with_other_states_is_warned_about_whatever_optim_says(
    tmp_path: Path, planned: str, own: Any, said: str
) -> None:
    model = tiny_model("llama")
    plan = plan_for(model, optimizer=planned)
    args = arguments(plan, tmp_path, max_steps=1)
    options = {"optimizers": (own(model.parameters(), lr=1e-4), None)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(model, args, plan.trainer_callback(), **options)
    texts = [str(each.message) for each in caught if "planned:" in str(each.message)]
    assert len(texts) == bool(said)
    assert all(re.match(f"Training with {said}: the plan's", each) for each in texts)


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (models.bert, models.text(4)),
        (partial(models.t5, dropout_rate=0.0), models.text(4)),
        (models.vit, models.images(4)),
    ],
)
def test_micro_batches_have_the_gradient_of_the_large_batch(
    make: Callable[..., nn.Module], batch: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Also of models whose loss is a mean, which a Trainer would add up."""
    model = models.still(make())
    plan = budgetfit.plan(
        model,
        gpu="rtx-4090",
        batch=batch,
        batch_size=2,
        effective_batch_size=4,
        precision="fp32",
        optimizer="adamw_torch",
    )
    names = defined_by(trainer_module.export_text(plan, "plan.json"))
    samples = [{name: value[n] for name, value in batch.items()} for n in range(4)]
    model.train()(**batch).loss.backward()
    gradients = (parameter.grad for parameter in model.parameters())
    whole = nn.utils.get_total_norm([each for each in gradients if each is not None])
    model.zero_grad()

    changes = QUIET_ARGUMENTS | {"max_steps": 1, "output_dir": str(tmp_path)}
    with mock.patch.dict(names, TrainingArguments=partial(made_with, changes)):
        built = names["make_trainer"](model, samples)
    built.remove_callback(transformers.PrinterCallback)
    built.train()
    found = built.state.log_history[0]["grad_norm"]
    assert found == pytest.approx(whole.item(), rel=1e-4)


def made_with(changes: dict[str, Any], **arguments: Any) -> Any:
    return transformers.TrainingArguments(**arguments | changes)


def test_a_loss_that_would_be_added_up_is_warned_about(tmp_path: Path) -> None:
    model = models.bert()
    options: dict[str, Any] = {"gpu": "rtx-4090", "batch": models.text(4)}
    options |= {"batch_size": 2, "effective_batch_size": 4, "optimizer": "adamw_torch"}
    plan = budgetfit.plan(model, precision="fp32", **options)
    args = arguments(plan, tmp_path)
    samples = [{name: value[0] for name, value in models.text(4).items()}] * 12
    with pytest.warns(UserWarning, match=r"Set model\.accepts_loss_kwargs = False"):
        transformers.Trainer(
            model, args, train_dataset=samples, callbacks=[plan.trainer_callback()]
        ).train()
    model.accepts_loss_kwargs = False
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The Trainer adds up")
        transformers.Trainer(
            model, args, train_dataset=samples, callbacks=[plan.trainer_callback()]
        ).train()


def test_another_model_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    plan = plan_for(tiny_model("gpt2"))
    model = tiny_model("llama")
    with pytest.raises(InputError, match=r"model has no block 'transformer\.h\.0'"):
        trained(model, arguments(plan, tmp_path), plan.trainer_callback())
    assert "forward" not in vars(model)


def test_several_cards_in_one_process_are_refused() -> None:
    model = tiny_model("gpt2")
    plan = plan_for(model)

    class Args:
        n_gpu = 2

    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES=0"):
        plan.trainer_callback().on_train_begin(Args(), None, None, model=model)


def test_the_exported_text_makes_a_trainer_that_trains(tmp_path: Path) -> None:
    model = tiny_model("llama")
    first, second, third, _ = blocks_of(model)
    segments = (
        Segment((first, second), nested=True),
        Segment((third,), mode="selective", saved_ops=PRODUCTS),
    )
    plan = plan_for(model, segments)
    plan.save(tmp_path / "plan.json")
    text = trainer_module.export_text(
        Plan.load(tmp_path / "plan.json"), str(tmp_path / "plan.json")
    )
    names = defined_by(text)
    counts = count_block_runs(model)

    built = names["make_trainer"](model, Samples())
    make_quiet(built, QUIET_ARGUMENTS)
    built.train()

    assert runs(counts) == [3, 2, 2, 1]
    assert f"per_device_train_batch_size={BATCH_SIZE}," in text
    assert f"at most {LENGTH} tokens" in text
    assert model.config.vocab_size == VOCABULARY


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_of_a_plan_are_trained_by_the_trainer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("llama")
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
    plain = tiny_model("llama")
    names = [f"base_model.model.{name}" for name in blocks_of(base)]
    counts = count_block_runs(base)
    model = peft.get_peft_model(base, config)
    plan = plan_for(tiny_model("llama"), (Segment((names[0],)), Segment((names[2],))))
    described = replace(
        plan.model,
        parameter_count=sum(p.numel() for p in model.parameters()),
        trainable_count=sum(p.numel() for p in model.parameters() if p.requires_grad),
        blocks=tuple(names),
    )
    plan = replace(plan, adapter=Adapter(method="lora", r=4), model=described)

    losses = trained(model, arguments(plan, tmp_path), plan.trainer_callback())

    assert runs(counts) == [2, 1, 2, 1]
    assert len(losses) == STEPS
    with pytest.raises(InputError, match=r"has no adapters(.|\n)*LoraConfig\(r=4"):
        plan.prepare(plain)
    with pytest.raises(InputError, match="torch alone cannot train LoRA r=4"):
        plan.to_torch_script()


def test_the_exported_text_hands_in_an_optimizer_that_the_plan_builds(
    tmp_path: Path,
) -> None:
    model = tiny_model("llama")
    plan = plan_for(model, gradient_accumulation_steps=1, optimizer_in_backward=True)
    plan.save(tmp_path / "plan.json")
    text = trainer_module.export_text(plan, str(tmp_path / "plan.json"))
    names = defined_by(text)
    built = names["make_trainer"](model, Samples())
    assert type(built.optimizer).__name__ == "OptimizerInBackward"
    assert built.optimizer.param_groups[0]["lr"] == built.args.learning_rate
    assert "adamw_torch, inside the backward pass" in text
