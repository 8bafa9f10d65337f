"""axolotl: export a plan as a config for ``axolotl train``.

Names and semantics are from 0.18.0 (axolotl-ai-cloud/axolotl, 067b021 of 2026-07-24):
src/axolotl/utils/schemas/{config,model,peft,training}.py, utils/config/__init__.py (one
dtype to load and compute in), loaders/model.py (quantization, preparation),
core/builders/causal.py (padding), docs/gradient_checkpointing.qmd. It requires
transformers 5.14, which lacks ``every_n_layers``.
"""

from collections.abc import Iterator
from typing import Final

from budgetfit.core.adapter import ALL_LINEAR, Adapter
from budgetfit.core.parallelism import Engine
from budgetfit.core.plan import Plan
from budgetfit.core.precision import BF16_CAPABILITY, find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.integrations.exports.ranks import dtype_lines, yaml_settings
from budgetfit.integrations.exports.yaml_file import (
    Settings,
    config_text,
    uniform_treatment,
)
from budgetfit.integrations.source_code.model_loading import has_fp32_copies, weights_of
from budgetfit.integrations.source_code.python_source import (
    dequantizer_of,
    exported_eval_batch_size,
    planned_length,
    planned_padding,
)

_ENGINES: Final[tuple[Engine, ...]] = ("ddp", "fsdp2")


def export_text(plan: Plan, _plan_file: str) -> str:
    """Return a YAML file; comments list what axolotl's config cannot express.

    Raises:
        InputError: If it cannot express the plan's model, optimizer or precision.
    """
    return config_text(plan, "axolotl", _checkpointing, _sections, _remarks, _ENGINES)


def _sections(plan: Plan, recipe: Recipe, memory: Settings) -> dict[str, Settings]:
    return {
        "model": {
            "base_model": weights_of(plan),
            **_dequantized(plan),
            **_adapter(plan.adapter),
            **_adapter_dtype(plan),
        },
        "precision": _precision(plan),
        "memory": memory,
        "data: REPLACE data sets by yours": {
            "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
            "sequence_len": planned_length(plan),
            "sample_packing": False,
            # Left out, batches are padded to a multiple of 64 tokens.
            **(planned_padding(plan) or {"pad_to_sequence_len": False}),
        },
        "training": {
            "output_dir": "out",
            "micro_batch_size": recipe.batch_size,
            "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
            "eval_batch_size": exported_eval_batch_size(plan),
            "optimizer": recipe.optimizer,
            "learning_rate": 5e-5 if plan.adapter is None else 2e-4,
            "num_epochs": 1,
            **yaml_settings(plan, "axolotl"),
        },
    }


def _checkpointing(recipe: Recipe, blocks: tuple[str, ...]) -> Settings | None:
    if not recipe.segments:
        return {"gradient_checkpointing": False}
    alike = uniform_treatment(recipe, blocks)
    if alike is None or alike.mode == "offload":
        return None
    found: Settings = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    if alike.mode == "selective":
        if not all("attention" in op for op in alike.saved_ops):
            return None
        found["selective_checkpointing"] = {"save": ["attention"]}
    if alike.input_on_host:
        found["activation_offloading"] = "hidden_states"
    return found


def _dequantized(plan: Plan) -> Settings:
    """Return what dequantizes stored weights while they are loaded."""
    name = dequantizer_of(plan)
    if not name:
        return {}
    return {
        "model_quantization_config": name,
        "model_quantization_config_kwargs": {"dequantize": True},
    }


def _adapter(adapter: Adapter | None) -> Settings:
    if adapter is None:
        return {}
    four = adapter.quantization == "nf4"
    found: Settings = {
        "adapter": "qlora" if four else "lora",
        "load_in_4bit": four,
        "load_in_8bit": adapter.quantization == "int8",
    }
    if four and not adapter.double_quantization:
        found["bnb_config_kwargs"] = {"bnb_4bit_use_double_quant": False}
    found |= {
        "lora_r": adapter.r,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
    }
    targets = adapter.target_modules
    if targets == ALL_LINEAR:
        found["lora_target_linear"] = True
    else:
        plain = isinstance(targets, str)
        found["lora_target_modules"] = targets if plain else list(targets)
    return found


def _adapter_dtype(plan: Plan) -> Settings:
    """Return what keeps adapters in bf16, which peft would cast to fp32."""
    if plan.adapter is None or find_precision(plan.recipe.precision).weights != "bf16":
        return {}
    return {"peft_autocast_adapter_dtype": False}


def _precision(plan: Plan) -> Settings:
    """Return its precision settings, which set dtypes of both weights and autocast.

    Raises:
        InputError: If fp16 weights would be trained, which GradScaler rejects.
    """
    policy = find_precision(plan.recipe.precision)
    half = policy.autocast or policy.weights
    if half == "as-is":
        capable = plan.gpu.compute_capability >= BF16_CAPABILITY
        half = "bf16" if capable else "fp16"
    if half == "fp16" and plan.adapter is None:
        raise InputError(
            "axolotl loads weights in fp16 where it computes in fp16, and fp16 "
            "weights cannot be trained with loss scaling. Plan again with "
            "--method lora or --precision fp32, or export --to llamafactory."
        )
    return {"bf16": half == "bf16", "fp16": half == "fp16", "tf32": policy.tf32}


def _remarks(plan: Plan) -> Iterator[str]:
    policy, parallelism = find_precision(plan.recipe.precision), plan.recipe.parallelism
    if parallelism is not None:
        options = parallelism.torchrun.replace("torchrun", "--launcher torchrun --", 1)
        where = ", on each machine" if parallelism.nodes > 1 else ""
        yield f"Start it with: axolotl train THIS_FILE {options}{where}"
        yield from dtype_lines(plan)
    if plan.recipe.loss_chunks > 1:
        yield (
            "Near to a loss in parts: cut_cross_entropy: true, with its plugin "
            "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin. Nothing was "
            "predicted for it."
        )
    if plan.adapter is None and policy.autocast == "bf16":
        yield (
            "It trains weights in bf16 where fp32 ones were planned: parameters, "
            "gradients and optimizer states need half of what was predicted, and "
            "updates are rounded. --precision bf16 plans that."
        )
    if policy.weights == "as-is":
        yield (
            "Planned in the dtypes of the model's config; here all is loaded and "
            "computed in 16 bits."
        )
    if _adapter_dtype(plan) and plan.adapter and plan.adapter.quantization:
        yield (
            "peft makes adapters of a quantised base in fp32, and they were planned in "
            "bf16: it needs more than predicted. --precision bf16-mixed plans that."
        )
    if has_fp32_copies(plan):
        yield (
            "Embeddings, norms and head end in 16 bits here, and were planned in fp32 "
            "(prepare_for_kbit): it needs less than predicted."
        )
