"""LLaMA-Factory: export a plan as a config for ``llamafactory-cli train``.

Names and semantics are from 0.9.6.dev0 (hiyouga/LLaMA-Factory, ff6d4d1 of
2026-08-18): src/llamafactory/hparams/{model,finetuning,data}_args.py, hparams/parser.py
(dtypes), model/adapter.py (trained weights are fp32 unless ``pure_bf16``),
model/model_utils/{checkpointing,quantization}.py, train/sft/workflow.py (padding). The
rest are transformers' ``TrainingArguments``.
"""

from collections.abc import Iterator
from typing import Final

from budgetfit.core.adapter import ALL_LINEAR, Adapter
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.integrations.exports.ranks import yaml_settings
from budgetfit.integrations.exports.yaml_file import (
    Settings,
    config_text,
    uniform_treatment,
)
from budgetfit.integrations.source_code.model_loading import has_fp32_copies, weights_of
from budgetfit.integrations.source_code.python_source import (
    exported_eval_batch_size,
    planned_length,
    planned_padding,
)

_BITS: Final = {"nf4": 4, "int8": 8}
_PADDED_TO: Final = 8  # tokens: batches are padded to a multiple, without a setting


def export_text(plan: Plan, _plan_file: str) -> str:
    """Return a YAML file; comments list what LLaMA-Factory's config cannot express.

    Raises:
        InputError: If it cannot express the plan's model, optimizer or adapters.
    """
    return config_text(plan, "LLaMA-Factory", _checkpointing, _sections, _remarks)


def _sections(plan: Plan, recipe: Recipe, memory: Settings) -> dict[str, Settings]:
    policy = find_precision(plan.recipe.precision)
    return {
        "model": {"model_name_or_path": weights_of(plan), **_stored(plan)},
        "method": _method(plan),
        "memory": memory,
        "data: REPLACE data set and template by yours": {
            "dataset": "identity",
            "template": "default",
            "cutoff_len": planned_length(plan),
            "packing": False,
        },
        "training": {
            "output_dir": "out",
            "per_device_train_batch_size": recipe.batch_size,
            "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
            "per_device_eval_batch_size": exported_eval_batch_size(plan),
            "optim": recipe.optimizer,
            "learning_rate": 5e-5 if plan.adapter is None else 1e-4,
            "bf16": policy.autocast == "bf16",
            "fp16": policy.autocast == "fp16",
            "tf32": True if policy.tf32 else None,
            **yaml_settings(plan, "LLaMA-Factory"),
        },
    }


def _checkpointing(recipe: Recipe, blocks: tuple[str, ...]) -> Settings | None:
    if not recipe.segments:
        return {"disable_gradient_checkpointing": True}
    alike = uniform_treatment(recipe, blocks)
    if alike is None or alike.mode != "recompute":
        return None
    if alike.input_on_host:  # unsloth's checkpoint offloads each block's input
        return {"disable_gradient_checkpointing": False, "use_unsloth_gc": True}
    return {"disable_gradient_checkpointing": False, "use_reentrant_gc": False}


def _stored(plan: Plan) -> Settings:
    adapter = plan.adapter
    if adapter is None or adapter.quantization is None:
        return {}
    found: Settings = {
        "quantization_method": "bnb",
        "quantization_bit": _BITS[adapter.quantization],
    }
    if adapter.quantization == "nf4":
        found["quantization_type"] = "nf4"
        found["double_quantization"] = adapter.double_quantization
    found["upcast_layernorm"] = has_fp32_copies(plan)
    return found


def _method(plan: Plan) -> Settings:
    adapter = plan.adapter
    found: Settings = {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full" if adapter is None else "lora",
    }
    if find_precision(plan.recipe.precision).weights == "bf16":
        if adapter is not None:
            raise InputError(
                "LLaMA-Factory makes adapters in fp32, without a setting for it, and "
                "they were planned in bf16 (precision bf16), which takes less. Plan "
                "again with --precision bf16-mixed, or export --to sft or axolotl."
            )
        found["pure_bf16"] = True
    if "pixel_values" in plan.model.batch:  # excluded by default
        found["freeze_vision_tower"] = False
        found["freeze_multi_modal_projector"] = False
    if adapter is not None:
        found |= {
            "lora_rank": adapter.r,
            "lora_alpha": adapter.alpha,
            "lora_dropout": adapter.dropout,
            "lora_target": _targets(adapter),
        }
    return found


def _targets(adapter: Adapter) -> str:
    targets = adapter.target_modules
    if targets == ALL_LINEAR:
        return "all"
    if isinstance(targets, str):
        raise InputError(
            f"LLaMA-Factory takes names of modules, and target_modules is the pattern "
            f"{targets!r}. Plan again with names: --target-modules q_proj,v_proj."
        )
    return ",".join(targets)


def _launch(parallelism: Parallelism) -> str:
    """Return the command that starts it (src/llamafactory/launcher.py)."""
    several = ""
    if parallelism.nodes > 1:
        meet = "MASTER_ADDR=HOST MASTER_PORT=29500"
        several = f"NNODES={parallelism.nodes} NODE_RANK=N {meet} "
    where = " (on each machine, N from 0; HOST is the first)" if several else ""
    ranks = parallelism.gpus // parallelism.nodes
    return (
        f"Start it with: FORCE_TORCHRUN=1 {several}NPROC_PER_NODE={ranks} "
        f"llamafactory-cli train THIS_FILE{where}"
    )


def _remarks(plan: Plan) -> Iterator[str]:
    adapter, policy = plan.adapter, find_precision(plan.recipe.precision)
    if plan.recipe.parallelism is not None:
        yield _launch(plan.recipe.parallelism)
    length = planned_length(plan) or 0
    padded = -(-length // _PADDED_TO) * _PADDED_TO
    if padded > length:
        yield (
            f"Batches are padded to a multiple of {_PADDED_TO} tokens here, {padded} "
            f"for {length}: it may need more than predicted. --max-length {padded} "
            "plans that."
        )
    multiple = planned_padding(plan).get("pad_to_multiple_of", _PADDED_TO)
    if multiple > _PADDED_TO:
        yield (
            f"Batches are padded to a multiple of {_PADDED_TO} tokens here, without a "
            f"setting, and were planned with {multiple}, so that memory fragments "
            "less: it may need more than predicted. --to sft and axolotl pad as "
            "planned."
        )
    if plan.recipe.loss_chunks > 1:
        yield (
            "Near to a loss in parts: enable_liger_kernel: true (package "
            "liger-kernel). What it takes says: budgetfit estimate MODEL --loop "
            "trainer --use-liger-kernel."
        )
    if has_fp32_copies(plan):
        yield (
            "Embeddings and head stay in 16 bits here, and were planned in fp32 "
            "(prepare_for_kbit): it needs less than predicted."
        )
    if adapter is None and policy.weights == "as-is":
        yield (
            "Planned in the dtypes of the model's config; here fp32 weights are "
            "trained: it may need more than predicted."
        )
    if adapter is not None and policy.weights == "fp32" and policy.autocast is None:
        yield (
            "The base was planned in fp32, and is loaded here in the dtype of its "
            "config: it needs no more than predicted."
        )
