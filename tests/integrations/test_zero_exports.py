"""Exports of a plan for DeepSpeed's ZeRO, trained by two processes with gloo."""

import json
import os
import types
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from torch import nn

import budgetfit
from budgetfit import InputError, Parallelism
from budgetfit.integrations.exports import accelerate as accelerate_export
from budgetfit.integrations.exports import deepspeed as deepspeed_export
from budgetfit.integrations.exports import lightning as lightning_export
from budgetfit.integrations.exports.trainer_arguments import settings
from tests.gloo_ranks import on_ranks
from tests.integrations.test_ranks_exports import one_process, samples
from tests.integrations.tiny_training import defined_by, plan_for, tiny_model
from tests.zero_ranks import deepspeed_of_its_own

RANKS = 2
Stage = Literal[1, 2, 3]
STAGES: tuple[Stage, ...] = (1, 2, 3)


def plan_of(
    stage: Stage, recipe: dict[str, Any] | None = None, **settings: Any
) -> budgetfit.Plan:
    """Two blocks recomputed, in two micro-batches of each rank."""
    zero = Parallelism(engine="deepspeed", gpus=RANKS, zero_stage=stage, **settings)
    given = {"gradient_accumulation_steps": 2, **(recipe or {})}
    return plan_for(tiny_model("llama"), parallelism=zero, **given)


def _scripts(folder: str) -> dict[int, list[float]]:
    """Losses of two updates, the second one after saving and loading."""
    found: dict[int, list[float]] = {}
    own = samples(2 * RANKS * 2)[int(os.environ["RANK"]) :: RANKS]
    for stage in STAGES:
        script = defined_by(plan_of(stage).to_torch_script())
        script["build_model"] = lambda: tiny_model("llama")
        words = ["--lr", "1e-2", "--max-grad-norm", "0.5", "--device", "cpu"]
        place = f"{folder}/{stage}"
        losses = found[stage] = []
        for then, data in (("--save", own[:2]), ("--resume", own[2:])):
            script["batches"] = lambda _, data=data: iter(data)
            with deepspeed_of_its_own():
                losses += script["main"]([*words, "--steps", "1", then, place])
    with deepspeed_of_its_own(), pytest.raises(SystemExit, match="no checkpoint of D"):
        script["main"]([*words, "--resume", folder])
    return found


def test_scripts_train_save_and_resume_as_one_process_does(tmp_path: Path) -> None:
    expected = one_process()
    for found in on_ranks(_scripts, RANKS, str(tmp_path)):
        assert set(found) == set(STAGES)
        for stage, losses in found.items():
            assert losses == pytest.approx(expected, abs=1e-6), stage
    text = plan_of(3, {"precision": "bf16-mixed"}, param_dtype="bf16").to_torch_script()
    assert "Start it with: torchrun --nproc-per-node 2 THIS_FILE" in text
    assert "'bf16': {'enabled': True}" in text
    assert "value.bfloat16() if value.is_floating_point()" in text
    assert "autocast" not in text


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_reads_the_planned_config(stage: Stage) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own imports
        from deepspeed.runtime.config import DeepSpeedConfig  # noqa: PLC0415

    plan = plan_of(
        stage,
        {"precision": "bf16-mixed"},
        param_dtype="bf16",
        bucket_elements=2_000_000,
        overlap_comm=False,
    )
    text = json.loads(deepspeed_export.export_text(plan, "plan.json"))
    assert "torchrun --nproc-per-node 2" in "\n".join(text.pop("_comment"))
    assert text == plan.to_deepspeed_config()
    config = DeepSpeedConfig(text)
    assert config.zero_optimization_stage == stage
    assert config.zero_config.reduce_bucket_size == 2_000_000
    assert config.zero_config.overlap_comm is False
    assert config.bfloat16_config.enabled
    assert config.train_micro_batch_size_per_gpu == plan.recipe.batch_size
    assert config.gradient_accumulation_steps == 2


def _arguments(folder: str) -> dict[str, Any]:
    """The configuration that the Trainer's arguments have made of the plan's."""
    with deepspeed_of_its_own():
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_grad_norm=0.5, **plan_of(2).to_training_arguments()
        )
        config: dict[str, Any] = arguments.hf_deepspeed_config.config
    return config


def test_the_trainer_takes_the_configuration(tmp_path: Path) -> None:
    """On a CPU accelerate trains other engines whatever it is told."""
    (config,) = on_ranks(_arguments, 1, str(tmp_path))
    assert config["zero_optimization"] == {"stage": 2}
    assert config["gradient_clipping"] == 0.5
    assert config["train_micro_batch_size_per_gpu"] == plan_of(2).recipe.batch_size
    assert config["gradient_accumulation_steps"] == 2


def _trained_by_callback() -> dict[int, dict[str, Any]]:
    """The Trainer's order: the engine has the model when the callback prepares it."""
    recipe = {"precision": "bf16-mixed", "gradient_accumulation_steps": 1}
    found: dict[int, dict[str, Any]] = {}
    own = samples(2 * RANKS)[int(os.environ["RANK"]) :: RANKS]
    for stage in STAGES:
        plan = plan_of(stage, recipe, param_dtype="bf16")
        losses, dtypes = {}, set()
        for by_callback in (False, True):
            model: Any = tiny_model("llama")
            with deepspeed_of_its_own():
                if by_callback:
                    engine, callback = _engine(plan, model)
                    dtypes = {str(each.dtype) for each in model.parameters()}
                else:
                    run = budgetfit.apply(plan, model, learning_rate=1e-2)
                    engine, callback = run.engine, None
                taken = []
                for batch in own:
                    loss = engine(**batch).loss
                    engine.backward(loss)
                    engine.step()
                    taken.append(float(loss))
                losses[by_callback] = taken
                if callback is not None:
                    with torch.no_grad():
                        floats = torch.zeros(1, 8, model.config.hidden_size)
                        dtypes.add(str(engine(inputs_embeds=floats).logits.dtype))
                    callback.on_train_end()
        found[stage] = {"losses": losses, "dtypes": dtypes}
    return found


def _engine(plan: budgetfit.Plan, model: nn.Module) -> tuple[Any, Any]:
    """DeepSpeed's engine, and the callback that has prepared its model."""
    import deepspeed  # noqa: PLC0415 - slow

    callback = plan.trainer_callback()
    callback.on_init_end(model=model)
    optimizer = plan.make_optimizer(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=plan.to_deepspeed_config()
    )[0]
    if plan.recipe.zero_stage == 3:
        callback.on_init_end(model=model)  # as of a model that was loaded in parts
    arguments = types.SimpleNamespace(
        n_gpu=1,
        world_size=RANKS,
        optim=plan.recipe.optimizer,
        label_smoothing_factor=0.0,
        **settings(plan),
    )
    callback.on_train_begin(arguments, model=model)
    return engine, callback


def test_the_callback_leaves_the_weights_of_an_engine_as_they_are() -> None:
    for found in on_ranks(_trained_by_callback, RANKS):
        assert set(found) == set(STAGES)
        for stage, trained in found.items():
            assert trained["dtypes"] == {"torch.bfloat16"}, stage
            by_run, by_callback = trained["losses"].values()
            assert by_callback == pytest.approx(by_run, abs=1e-6), stage


def test_floats_stay_as_they_are_until_deepspeed_has_the_weights() -> None:
    model: Any = tiny_model("llama")
    plan = plan_of(2, {"precision": "bf16-mixed"}, param_dtype="bf16")
    floats = torch.zeros(1, 8, model.config.hidden_size)
    with plan.prepare(model), torch.no_grad():
        assert model(inputs_embeds=floats).logits.dtype == torch.float32
        model.bfloat16()
        assert model(inputs_embeds=floats).logits.dtype == torch.bfloat16


def test_machines_of_a_launch_of_accelerate_wait_for_each_other(tmp_path: Path) -> None:
    """With another launcher each machine starts ``deepspeed`` for itself."""
    zero = Parallelism(engine="deepspeed", gpus=4, gpus_per_node=2, zero_stage=3)
    plan = plan_for(tiny_model("llama"), parallelism=zero)
    file = tmp_path / "accelerate.yaml"
    file.write_text(accelerate_export.export_text(plan, "plan.json"))
    parser = launch_command_parser()
    words = parser.parse_args(["--config_file", str(file), "train.py"])
    config = load_config_from_file(str(file))
    assert (
        "deepspeed_multinode_launcher"
        not in (accelerate_export.launch_config(plan_of(3))["deepspeed_config"])
    )
    for name, value in {**vars(config), **config.deepspeed_config}.items():
        setattr(words, name, value)
    words.deepspeed_fields_from_accelerate_config = ""
    command, _ = prepare_deepspeed_cmd_env(words)
    assert command is None  # torchrun's own, in this process
    assert (words.nnodes, words.nproc_per_node) == ("2", "2")
    assert words.rdzv_endpoint == "HOST:29500"


def test_a_launch_of_accelerate(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(accelerate_export.export_text(plan_of(3), "plan.json"))
    config = load_config_from_file(str(file))
    assert str(config.distributed_type).endswith("DEEPSPEED")
    assert config.deepspeed_config["zero_stage"] == 3
    with pytest.raises(InputError, match="no setting for bucket_elements=9"):
        accelerate_export.export_text(plan_of(3, bucket_elements=9), "plan.json")
    with pytest.raises(
        InputError, match=r"deepspeed on 2 GPUs, .* not written for Lig"
    ):
        lightning_export.export_text(plan_of(3), "plan.json")
