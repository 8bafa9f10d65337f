"""Exports of a plan for several GPUs, trained by two processes with gloo."""

import functools
import os
import tempfile
import types
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import accelerate
import lightning
import pytest
import torch
import transformers
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import budgetfit
from budgetfit import InputError, Parallelism, Segment
from budgetfit.core.adapter import Adapter
from budgetfit.core.plan import Alternative
from budgetfit.gpus.table import find_gpu
from budgetfit.integrations.exports import accelerate as accelerate_export
from budgetfit.integrations.exports import axolotl as axolotl_export
from budgetfit.integrations.exports import deepspeed as deepspeed_export
from budgetfit.integrations.exports import lightning as lightning_export
from budgetfit.integrations.exports import llamafactory as llamafactory_export
from budgetfit.integrations.exports import trainer as trainer_export
from budgetfit.integrations.exports import trl as trl_export
from budgetfit.integrations.source_code import plain_torch
from budgetfit.planning.profiling.block_chain import TrainingSettings
from budgetfit.workload.workload import Workload
from tests.gloo_ranks import on_ranks
from tests.integrations.tiny_training import (
    blocks_of,
    defined_by,
    losses_of,
    mixed_segments,
    plan_for,
    sft_texts,
    tiny_model,
    word_tokenizer,
)

RANKS, STEPS = 2, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", "gradient_as_bucket_view": True, "bucket_cap_mb": 8},
    "plain ddp": {"engine": "ddp"},
    "ddp, each": {"engine": "ddp", "sync_each_batch": True},
    "fsdp2": {"engine": "fsdp2"},
    "hsdp": {"engine": "fsdp2", "shard": 1, "sync_each_batch": True},
    "fsdp2, on the CPU": {"engine": "fsdp2", "cpu_offload": True},
}

# Two blocks together, where no weights are gathered for one, and a block's product.
SEGMENTS: dict[str, Any] = {"ddp, each": lambda of: of[:2], "hsdp": lambda of: of[1:2]}


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        ids = torch.randint(64, (3, 8), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


def plan_of(name: str | None, **recipe: Any) -> budgetfit.Plan:
    """Two blocks recomputed, in two micro-batches of each rank or four of one."""
    several = Parallelism(gpus=RANKS, **SETTINGS[name]) if name else None
    model = tiny_model("llama")
    segments = SEGMENTS[name](mixed_segments(model)) if name in SEGMENTS else None
    recipe = {"gradient_accumulation_steps": 2 if name else 2 * RANKS, **recipe}
    return plan_for(model, segments, parallelism=several, **recipe)


def one_process() -> list[float]:
    """Losses of updates of one process with the samples of all."""
    run = budgetfit.apply(plan_of(None), tiny_model("llama"), learning_rate=1e-2)
    data = samples(2 * RANKS * STEPS)
    losses = [float(run.step(each, max_grad_norm=0.5)) for each in data]
    return torch.tensor(losses).view(STEPS, -1).mean(1).tolist()


def next_port() -> None:
    """Let the next process group meet at a port of its own."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def _scripts(folder: str) -> dict[str, list[float]]:
    found = {}
    rank = int(os.environ["RANK"])
    for name in SETTINGS:
        script = defined_by(plan_of(name).to_torch_script())
        script["build_model"] = lambda: tiny_model("llama")
        words = ["--lr", "1e-2", "--max-grad-norm", "0.5", "--device", "cpu"]
        own = samples(2 * RANKS * STEPS)[rank::RANKS]
        script["batches"] = lambda _, own=own: iter(own)
        place = f"{folder}/{name}"
        found[name] = script["main"]([*words, "--steps", "1", "--save", place])
        next_port()
        script["batches"] = lambda _, own=own: iter(own[2:])
        found[name] += script["main"]([*words, "--steps", "1", "--resume", place])
        next_port()
    return found


def test_scripts_of_torch_alone_train_save_and_resume(tmp_path: Path) -> None:
    expected = one_process()
    for found in on_ranks(_scripts, RANKS, str(tmp_path)):
        for name, losses in found.items():
            assert losses == pytest.approx(expected, abs=1e-6), name
    text = plan_of("fsdp2").to_torch_script()
    assert "Start it with: torchrun --nproc-per-node 2 THIS_FILE" in text
    assert "Each rank yields its own samples, as of a DistributedSampler." in text
    assert "Each rank yields" not in plan_of(None).to_torch_script()
    policy = {"engine": "fsdp2", "param_dtype": "bf16", "reduce_dtype": "fp32"}
    SETTINGS["policy"] = policy
    try:
        text = plan_of("policy", precision="bf16-mixed").to_torch_script()
    finally:
        del SETTINGS["policy"]
    assert "param_dtype=torch.bfloat16, reduce_dtype=torch.float32" in text
    assert "autocast" not in text


class _Scaler(torch.amp.GradScaler):
    """It remembers the scales that it was given."""

    loaded: ClassVar[list[float]] = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded.append(state_dict["scale"])
        super().load_state_dict(state_dict)


def _script_states(folder: str) -> list[float]:
    """Scales that a script has loaded; states of parameters without a gradient."""
    SETTINGS["fp16"] = {"engine": "fsdp2", "param_dtype": "fp16"}
    script = defined_by(plan_of("fp16", precision="fp16-mixed").to_torch_script())
    script["build_model"] = lambda: tiny_model("llama")
    for option, scale in (("--save", 8.0), ("--resume", 4.0)):
        next_port()
        words = ["--steps", "1", "--device", "cpu", option, f"{folder}/scale"]
        made = functools.partial(_Scaler, init_scale=scale)
        with mock.patch.object(torch.amp, "GradScaler", made):
            script["main"](words)

    hooked = torch.nn.Linear(4, 4)
    hooked.bias.register_hook(lambda _: None)
    with pytest.raises(SystemExit, match="would drop the hooks of bias"):
        script["wrap"](hooked, torch.device("cpu"))

    next_port()
    script["join_ranks"]("cpu")
    found = []
    for use in (script["save"], script["load"]):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        if not found:
            for item in model[0].parameters():
                item.grad = torch.ones_like(item)
            optimizer.step()
        optimizer.zero_grad()
        use(model, optimizer, f"{folder}/states")
        found.append([optimizer.state[each]["step"] for each in model[0].parameters()])
        assert found[-1] == [1, 1]
        assert not any(map(optimizer.state.get, model[1].parameters()))
    return _Scaler.loaded


def test_scripts_resume_scale_and_parameters_that_have_no_state(tmp_path: Path) -> None:
    for loaded in on_ranks(_script_states, RANKS, str(tmp_path)):
        assert loaded == [8.0]


def _libraries(folder: str) -> dict[str, list[float]]:
    """Losses of a last micro-batch are enough: they need the update before."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    rank = int(os.environ["RANK"])
    found = {}
    plan = plan_of("ddp", gradient_accumulation_steps=1, loss_chunks=3)
    own = samples(RANKS * 3)[rank::RANKS]

    model = tiny_model("llama")
    plan.prepare(model)
    optimizer = plan.make_optimizer(model.parameters(), lr=1e-2)
    handler = accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[handler])
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for batch in own:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    found["accelerate"] = losses

    plan = plan_of("plain ddp", gradient_accumulation_steps=1, loss_chunks=3)
    model = tiny_model("llama")
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        max_grad_norm=0.0,
        **plan.to_training_arguments(),
    )
    assert arguments.world_size == RANKS
    rows = [
        {name: item[row] for name, item in batch.items()}
        for batch in samples(RANKS * 3)
        for row in range(3)
    ]
    trainer = _InOrder(
        model=model,
        args=arguments,
        train_dataset=rows,
        callbacks=[plan.trainer_callback()],
    )
    found["trainer"] = losses_of(trainer)

    found["sft"] = sft_losses(plan_of("plain ddp", gradient_accumulation_steps=1))

    found["trainer, fsdp2"] = _sharded_before_training(arguments, own)

    warnings.simplefilter("ignore")  # Lightning's own, of few workers and old functions
    for name in ("ddp", "fsdp2"):
        torch.distributed.destroy_process_group()
        next_port()
        found[f"lightning, {name}"] = _lightning_losses(name, own)
    return found


def shard(model: torch.nn.Module, classes: str) -> torch.nn.Module:
    """What accelerate does with FSDP2's settings: on a CPU it trains DDP."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=classes,
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=None,
        mixed_precision="no",
        is_main_process=True,
        device=torch.device("cpu"),
    )
    sharded: torch.nn.Module = fsdp2_prepare_model(accelerator, model)
    return sharded


def _sharded_before_training(
    arguments: transformers.TrainingArguments, own: list[dict[str, torch.Tensor]]
) -> list[float]:
    """The Trainer's order: the model is sharded when the callback prepares it."""
    plan = plan_of("fsdp2", gradient_accumulation_steps=1)
    model: Any = tiny_model("llama")
    callback = plan.trainer_callback()
    callback.on_init_end(model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accelerate's own
        model = shard(model, plan.model.block_type)
    optimizer = plan.make_optimizer(model.parameters(), lr=1e-2)
    callback.on_train_begin(arguments, model=model)
    losses = []
    for batch in own:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / RANKS
        torch.distributed.all_reduce(mean)
        losses.append(float(mean))
    callback.on_train_end()
    return losses


def sft_losses(plan: budgetfit.Plan) -> list[float]:
    """Losses of TRL's trainer, as its exported script makes it."""
    trl = pytest.importorskip("trl")
    options: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=tiny_model("llama"),
            args=trl.SFTConfig(output_dir=folder, **plan.to_sft_config(**options)),
            train_dataset=sft_texts(),
            processing_class=word_tokenizer(),
            callbacks=[plan.trainer_callback()],
        )
        return losses_of(trainer)


def _lightning_losses(name: str, own: list[dict[str, torch.Tensor]]) -> list[float]:
    chunks = 3 if name == "fsdp2" else 1
    plan = plan_of(name, gradient_accumulation_steps=1, loss_chunks=chunks)
    callback = plan.lightning_callback()
    module = _Module(plan, callback)
    lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[callback],
        **plan.to_lightning_arguments(),
    ).fit(module, torch.utils.data.DataLoader(own, batch_size=None))
    kinds = {type(each) for each in module.parameters()}
    assert (DTensor in kinds) is (name == "fsdp2")
    first: Any = module.net.get_submodule("model.layers.0")
    assert "forward" not in vars(first)
    callback.on_fit_start(None, module)  # another fit
    assert "forward" in vars(first)
    callback.on_fit_end()
    assert "forward" not in vars(first)
    return module.losses


class _Module(lightning.LightningModule):
    def __init__(self, plan: budgetfit.Plan, callback: Any) -> None:
        super().__init__()
        self.net, self.plan, self.callback = tiny_model("llama"), plan, callback
        self.losses: list[float] = []

    def configure_model(self) -> None:
        self.callback.shard(self)  # nothing with DDP

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.net(**batch).loss
        mean = loss.detach() / RANKS
        torch.distributed.all_reduce(mean)
        self.losses.append(float(mean))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.plan.make_optimizer(self.parameters(), lr=1e-2)


class _InOrder(transformers.Trainer):
    """Samples in their order, so that ranks have whole micro-batches of them."""

    def _get_train_sampler(
        self, *_: object
    ) -> torch.utils.data.Sampler[dict[str, torch.Tensor]]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def test_libraries_train_on_ranks_as_planned(tmp_path: Path) -> None:
    plan = plan_of(None, gradient_accumulation_steps=RANKS)
    run = budgetfit.apply(plan, tiny_model("llama"), learning_rate=1e-2)
    losses = [float(run.step(each)) for each in samples(RANKS * 3)]
    expected = torch.tensor(losses).view(-1, RANKS).mean(1).tolist()
    by_sft = sft_losses(plan)
    for found in on_ranks(_libraries, RANKS, str(tmp_path)):
        assert found["accelerate"] == pytest.approx(expected, abs=1e-6)
        for name in ("trainer, fsdp2", "lightning, ddp", "lightning, fsdp2"):
            assert found[name] == pytest.approx(expected, abs=1e-6), name
        assert found["trainer"] == pytest.approx(expected, abs=1e-4)  # it rounds
        assert found["sft"] == pytest.approx(by_sft, abs=1e-4)


def test_a_script_has_no_checkpoint_over_blocks_that_are_gathered_one_by_one() -> None:
    model = tiny_model("llama")
    together = mixed_segments(model)[:1]
    for several in (
        Parallelism(engine="fsdp2", gpus=2),
        Parallelism(engine="deepspeed", gpus=2, zero_stage=3),
    ):
        plan = plan_for(model, together, parallelism=several)
        with pytest.raises(
            InputError, match=r"layers.0 to model.layers.1 \(recomputed"
        ):
            plan.to_torch_script()
        settings = TrainingSettings(
            precision="fp32", optimizer="sgd", parallelism=several
        )
        alone = settings.recipe(1, together).segments
        assert alone == tuple(Segment((name,)) for name in together[0].blocks)


def test_settings_of_fsdp2_make_the_libraries_real_objects(tmp_path: Path) -> None:
    """On a CPU accelerate trains DDP whatever it is told: objects are made instead."""
    plan = plan_of("fsdp2", precision="bf16-mixed")
    path = tmp_path / "accelerate.yaml"
    path.write_text(accelerate_export.export_text(plan, "plan.json"), encoding="utf-8")
    config = load_config_from_file(str(path))
    assert (config.distributed_type, config.num_processes) == ("FSDP", 2)
    assert (
        config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    )
    assert "gathers weights and reduces gradients in bf16" in path.read_text("utf-8")

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, **plan.to_training_arguments()
    )
    plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    model = tiny_model("llama")
    plugin.set_auto_wrap_policy(model)
    wraps = plugin.auto_wrap_policy
    wrapped = [name for name, item in model.named_modules() if wraps(item, False, 0)]
    assert tuple(wrapped) == plan.model.blocks
    script = trainer_export.export_text(plan, "plan.json")
    assert "torchrun --nproc-per-node 2" in script
    assert "fsdp=True" in script
    compile(script, "script", "exec")

    ddp = plan_of("ddp")
    text = lightning_export.export_text(ddp, "plan.json")
    assert "DDPStrategy(bucket_cap_mb=8, gradient_as_bucket_view=True)" in text
    compile(text, "script", "exec")
    text = lightning_export.export_text(plan_of("fsdp2"), "plan.json")
    assert "ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)" in text
    assert "configure_model is ``callback.shard(self)``" in text
    assert "Lightning reduces gradients in each micro-batch" in text
    compile(text, "script", "exec")
    text = accelerate_export.export_text(ddp, "plan.json")
    assert "DistributedDataParallelKwargs(bucket_cap_mb=8" in text
    assert '"MULTI_GPU"' in text
    script = trainer_export.export_text(ddp, "plan.json")
    assert "no gradient_as_bucket_view: its gradients take 161.1 KiB more" in script
    full = ddp.changed(
        estimate=replace(ddp.estimate, reserved_bytes=ddp.budget.usable_bytes)
    )
    with pytest.raises(InputError, match=r"161.1 KiB more than .*, .* usable"):
        trainer_export.export_text(full, "plan.json")
    each = plan_of("ddp, each")
    assert "sync_each_batch=True" in accelerate_export.export_text(each, "plan.json")
    file = yaml.safe_load(axolotl_export.export_text(each, "plan.json"))
    kwargs = file["accelerator_config"]["gradient_accumulation_kwargs"]
    assert kwargs == {"sync_each_batch": True}


def test_offloaded_shards_are_the_libraries_own_setting(tmp_path: Path) -> None:
    """Gradients are clipped in host memory, which takes a backend for it."""
    plan = plan_of("fsdp2, on the CPU")
    backends = "cpu:gloo,cuda:nccl"
    path = tmp_path / "accelerate.yaml"
    path.write_text(accelerate_export.export_text(plan, "plan.json"), encoding="utf-8")
    config = load_config_from_file(str(path)).fsdp_config
    assert config["fsdp_offload_params"] is True  # accelerate then takes both backends
    arguments = plan.to_training_arguments()
    assert arguments.pop("ddp_backend") == backends  # for CUDA, under torchrun
    made = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, **arguments
    )
    plugin = FullyShardedDataParallelPlugin(**made.fsdp_plugin_args)
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    script = trainer_export.export_text(plan, "plan.json")
    assert f'ddp_backend="{backends}"' in script
    text = lightning_export.export_text(plan, "plan.json")
    assert f'process_group_backend="{backends}"' in text
    compile(text, "script", "exec")
    text = plan.to_torch_script()
    assert (
        f'dist.init_process_group("{backends}" if name == "cuda" else "gloo")' in text
    )
    assert 'settings["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)' in text
    file = yaml.safe_load(axolotl_export.export_text(plan, "plan.json"))
    assert file["fsdp_config"]["offload_params"] is True
    assert "ddp_backend" not in file


def test_a_script_shards_the_modules_of_a_list() -> None:
    plan = plan_of("fsdp2")
    assert "with_forward" not in plan.to_torch_script()
    model = replace(plan.model, block_types=("ModuleList", "LlamaDecoderLayer"))
    script = defined_by(plan.changed(model=model).to_torch_script())
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    nested = torch.nn.ModuleList([one, torch.nn.ModuleList([two])])
    assert script["with_forward"](nested) == [one, two]
    assert script["with_forward"](one) == [one]
    assert script["with_forward"](torch.nn.ParameterList([one.weight])) == []
    groups: list[Any] = []
    script["fully_shard"] = lambda group, **_: groups.append(group)
    script["init_device_mesh"] = mock.Mock()
    tiny = tiny_model("llama")
    script["wrap"](tiny, torch.device("cpu"))
    blocks = [[tiny.get_submodule(name)] for name in plan.model.blocks]
    assert groups == [*blocks, tiny]


def test_the_trainer_is_warned_of_whole_gradients(tmp_path: Path) -> None:
    each = Parallelism(engine="fsdp2", gpus=RANKS, sync_each_batch=True)
    plan = plan_for(tiny_model("llama"), (), parallelism=each)
    asked = plan.to_training_arguments()
    callback = plan.trainer_callback()
    for given, whole in ((asked, False), ({**asked, "accelerator_config": {}}, True)):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, **given
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            callback.on_train_begin(arguments, model=tiny_model("llama"))
        callback.undo()
        texts = [str(row.message) for row in said if "planned" in str(row.message)]
        assert any("gradients whole on each rank" in text for text in texts) == whole


@pytest.mark.parametrize(
    ("export", "name", "said"),
    [
        (
            lightning_export,
            "ddp, each",
            "for ddp on 2 GPUs, .* not written for Lightning",
        ),
        (
            deepspeed_export,
            "ddp",
            'DeepSpeed: plan with engine="deepspeed".* Use --to torch',
        ),
        (axolotl_export, "hsdp", "axolotl has no setting for shard=1"),
        (llamafactory_export, "fsdp2", "not written for LLaMA-Factory"),
        (accelerate_export, "hsdp", "accelerate has no setting for shard=1"),
    ],
)
def test_what_a_library_has_no_setting_for(
    export: ModuleType, name: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        export.export_text(plan_of(name), "plan.json")


def test_lightning_is_given_no_fp16_under_fsdp2_which_it_would_not_scale() -> None:
    plan = plan_of("fsdp2", precision="fp16-mixed")
    for make in (
        plan.to_lightning_arguments,
        lambda: lightning_export.export_text(plan, "plan.json"),
    ):
        with pytest.raises(InputError, match=r"no loss of fp16 there\. Use --to torch"):
            make()
    assert "GradScaler" in plan.to_torch_script()
    of_ddp = plan_of("ddp", precision="fp16-mixed")
    assert of_ddp.to_lightning_arguments()["precision"] == "16-mixed"


def _tiny_bart() -> torch.nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=64,
            d_model=16,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=16,
        )
    )


def test_blocks_of_several_classes_are_all_sharded_alone(tmp_path: Path) -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    workload = Workload(model=_tiny_bart(), batch=batch, gpu=find_gpu("h100-80gb"))
    model = workload.with_found_blocks().summary()
    assert model.block_types == ("BartEncoderLayer", "BartDecoderLayer")
    several = Parallelism(engine="fsdp2", gpus=RANKS)
    plan = plan_for(tiny_model("llama"), (), parallelism=several).changed(model=model)
    plan = budgetfit.Plan.from_json(plan.to_json())
    named = "BartEncoderLayer,BartDecoderLayer"
    for text in (
        accelerate_export.export_text(plan, "plan.json"),
        trainer_export.export_text(plan, "plan.json"),
    ):
        assert named in text
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, **plan.to_training_arguments()
    )
    plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    live = _tiny_bart()
    plugin.set_auto_wrap_policy(live)
    wraps = plugin.auto_wrap_policy
    wrapped = [name for name, item in live.named_modules() if wraps(item, False, 0)]
    assert set(wrapped) == set(plan.model.blocks)

    older = plan.changed(model=replace(model, block_types=()))
    with pytest.raises(InputError, match=r"in 2 lists: model.decoder.layers, .* again"):
        older.to_training_arguments()
    lists = plan.changed(model=replace(model, block_types=("ModuleList",)))
    with pytest.raises(InputError, match="are a ModuleList"):
        lists.to_accelerate_config()


def test_a_loss_in_parts_is_refused_where_accelerate_shards_the_head() -> None:
    plan = plan_of("fsdp2", loss_chunks=3)
    said = r"in 3 parts, .* Use --to lightning, --to torch"
    for make in (
        plan.to_accelerate_config,
        plan.to_training_arguments,
        lambda: accelerate_export.export_text(plan, "plan.json"),
        lambda: trainer_export.export_text(plan, "plan.json"),
    ):
        with pytest.raises(InputError, match=said):
            make()
    assert "fsdp=True" in trl_export.export_text(plan, "plan.json")  # TRL cuts it
    assert "fsdp_version" in axolotl_export.export_text(plan, "plan.json")  # whole


def _cut_by_a_sharded_head() -> list[str]:
    plan = plan_of("fsdp2", loss_chunks=3, gradient_accumulation_steps=1)
    torch.distributed.init_process_group("gloo")
    warnings.simplefilter("ignore")  # accelerate's own
    said = []
    for prepared_first in (True, False):
        model: Any = tiny_model("llama")
        if prepared_first:
            plan.prepare(model)
        shard(model, plan.model.block_type)
        then = functools.partial(model, **samples(1)[0])
        if not prepared_first:
            then = functools.partial(plan.prepare, model)
        with pytest.raises(InputError) as refused:
            then()
        said.append(str(refused.value))
    return said


def test_a_sharded_head_ends_a_loss_in_parts_in_a_line_that_says_so() -> None:
    """In place of a segmentation fault in the backward."""
    (said,) = on_ranks(_cut_by_a_sharded_head, 1)
    for line in said:
        assert "output head in a group of its own" in line


def test_the_trainer_takes_no_optimizer_under_fsdp() -> None:
    fsdp, ddp = Parallelism(engine="fsdp2", gpus=2), Parallelism(engine="ddp", gpus=2)
    model = tiny_model("llama")
    plan = plan_for(model, (), optimizer="nadam", parallelism=fsdp)
    with pytest.raises(InputError, match="'nadam' in its optim names, and under FSDP"):
        trainer_export.export_text(plan, "plan.json")
    other = plan_for(model, (), optimizer="nadam", parallelism=ddp)
    assert "optimizers=(plan.make" in trainer_export.export_text(other, "plan.json")


def test_several_machines_are_told_where_to_meet() -> None:
    two = Parallelism(engine="fsdp2", gpus=4, gpus_per_node=2)
    plan = plan_for(tiny_model("llama"), None, parallelism=two)
    meet = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400"
    for text in (plan.to_torch_script(), trainer_export.export_text(plan, "plan.json")):
        assert f"torchrun {meet} --nproc-per-node 2 THIS_FILE (on each" in text
    text = accelerate_export.export_text(plan, "plan.json")
    assert "# On each machine" in text
    found = yaml.safe_load(text)
    assert (found["num_machines"], found["main_process_ip"]) == (2, "HOST")
    alone = yaml.safe_load(accelerate_export.export_text(plan_of("ddp"), "plan.json"))
    assert "main_process_ip" not in alone


def test_a_file_of_settings_is_started_by_its_program() -> None:
    zero = Parallelism(engine="deepspeed", gpus=2, zero_stage=2)
    text = deepspeed_export.export_text(
        plan_for(tiny_model("llama"), None, parallelism=zero), "plan.json"
    )
    assert "Start the program that reads this with: torchrun" in text
    assert "THIS_FILE" not in text


def test_adapters_are_not_sent_to_a_script_of_torch_alone() -> None:
    plan = plan_of("ddp").changed(adapter=Adapter(method="lora"))
    for export in (deepspeed_export.export_text, plain_torch.export_text):
        with pytest.raises(InputError, match="--to trainer") as refused:
            export(plan, "plan.json")
        assert "--to torch" not in str(refused.value)
        assert "--to sft" not in str(refused.value)


def test_files_for_axolotl_and_llamafactory_have_the_engine_and_the_command() -> None:
    every = [Segment((name,)) for name in blocks_of(tiny_model("llama"))]

    def read(export: ModuleType, **several: Any) -> tuple[dict[str, Any], str]:
        parallelism = Parallelism(**several)
        plan = plan_for(tiny_model("llama"), tuple(every), parallelism=parallelism)
        text = export.export_text(plan, "plan.json")
        said = "\n".join(line for line in text.splitlines() if line.startswith("#"))
        return yaml.safe_load(text), said

    for export in (axolotl_export, llamafactory_export):
        found, said = read(export, engine="ddp", gpus=2, bucket_cap_mb=8)
        assert found["ddp_find_unused_parameters"] is False
        assert found["ddp_bucket_cap_mb"] == 8
        assert "fsdp_config" not in found
        _, copied = read(export, engine="ddp", gpus=2, gradient_as_bucket_view=True)
        assert "no gradient_as_bucket_view" in copied
        assert "no gradient_as_bucket_view" not in said
    start = "Start it with: FORCE_TORCHRUN=1"
    assert f"{start} NPROC_PER_NODE=2 llamafactory-cli train THIS_FILE" in said
    _, said = read(llamafactory_export, engine="ddp", gpus=4, gpus_per_node=2)
    meet = "NNODES=2 NODE_RANK=N MASTER_ADDR=HOST MASTER_PORT=29500"
    assert f"{start} {meet} NPROC_PER_NODE=2 llamafactory-cli train" in said
    found, said = read(axolotl_export, engine="fsdp2", gpus=2)
    assert "train THIS_FILE --launcher torchrun -- --nproc-per-node 2" in said
    assert found["fsdp_version"] == 2
    assert found["fsdp_config"] == {
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": False,
    }


def test_rows_of_other_engines_do_not_stand_in() -> None:
    """A file that cannot say some blocks takes another row, of the same engine."""
    ddp, sharded = (Parallelism(engine=name, gpus=2) for name in ("ddp", "fsdp2"))
    model = tiny_model("llama")
    every = tuple(Segment((name,)) for name in blocks_of(model))
    rows = tuple(
        Alternative(
            label=label,
            estimate=plan_for(model, every, parallelism=each).estimate,
            fits=True,
        )
        for label, each in (("sharded", sharded), ("every block recomputed", ddp))
    )
    plan = plan_for(model, None, parallelism=ddp).changed(alternatives=rows)
    text = llamafactory_export.export_text(plan, "plan.json")
    assert "judged to fit: every block recomputed" in text
    only = plan.changed(alternatives=rows[:1])
    assert "It may not fit" in llamafactory_export.export_text(only, "plan.json")


def test_scripts_compile_blocks_whole_under_ddp() -> None:
    whole = "torch._dynamo.config.optimize_ddp = False"
    for name in ("ddp", "fsdp2"):
        text = plan_of(name, compile="blocks").to_torch_script()
        assert "block.forward = compiled(block.forward)" in text
        assert (whole in text) is (name == "ddp")
