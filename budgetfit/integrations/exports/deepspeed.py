"""DeepSpeed: export a plan as a config for ``deepspeed.initialize``."""

import json
from importlib.util import find_spec
from typing import Any

from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.integrations.exports.ranks import refuse_several_gpus, zero_settings
from budgetfit.integrations.optional_imports import import_attribute
from budgetfit.integrations.source_code.model_loading import load_model_text
from budgetfit.integrations.source_code.plain_torch_ranks import launch_line
from budgetfit.integrations.source_code.python_source import (
    DTYPES,
    import_block,
    plan_summary_lines,
    refuse_optimizer_in_backward,
)


def engine_config(plan: Plan) -> dict[str, Any]:
    """Return the planned config; on one GPU with ZeRO stage 0, nothing to partition.

    Mixed precision is DeepSpeed's own autocast over fp32 weights, as planned. Its older
    ``bf16`` and ``fp16`` blocks keep two copies of the weights; they are used only
    where the installed DeepSpeed has no autocast. Pure bf16 is set by ``plan.prepare``.

    Raises:
        InputError: If the plan's optimizer steps inside the backward pass, or it is for
            another engine on several GPUs.
    """
    refuse_optimizer_in_backward(plan, "DeepSpeed")
    if plan.recipe.zero_stage is not None:
        return zero_settings(plan)
    refuse_several_gpus(plan, 'DeepSpeed: plan with engine="deepspeed"')
    recipe = plan.recipe
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
    }
    autocast = find_precision(recipe.precision).autocast
    if autocast is not None and _has_autocast():
        config["torch_autocast"] = {"enabled": True, "dtype": DTYPES[autocast]}
    elif autocast is not None:
        config[autocast] = {"enabled": True}
    return config


def _of_ranks(plan: Plan) -> list[str]:
    parallelism = plan.recipe.parallelism
    if parallelism is None:
        return [
            "Not predicted: what DeepSpeed allocates for itself (flat buffers, buckets)"
        ]
    return [
        launch_line(parallelism, "the program that reads this", "train.py"),
        "In each micro-batch: loss = engine(...); engine.backward(loss); engine.step()",
    ]


def _has_autocast() -> bool:
    if find_spec("deepspeed") is None:
        return True
    constants = import_attribute("deepspeed.runtime", "constants")
    return hasattr(constants, "TORCH_AUTOCAST")


def export_text(plan: Plan, plan_file: str) -> str:
    """Return the config as JSON; further steps are in a key that DeepSpeed ignores."""
    loading = load_model_text(plan)
    modules = {*loading.modules, "budgetfit", "deepspeed"}
    code = f"{import_block(modules, loading.names)}{loading.constants}"
    comment = [
        *filter(None, plan_summary_lines(plan, "A DeepSpeed engine")),
        *filter(None, f"{code}{loading.code}".splitlines()),
        "model = load_model()",
        f"plan = budgetfit.Plan.load({plan_file!r}); plan.prepare(model)",
        "optimizer = plan.make_optimizer(model.parameters(), lr=5e-5)",
        "deepspeed.initialize(model=model, optimizer=optimizer, config=this file)",
        *_of_ranks(plan),
    ]
    return json.dumps({"_comment": comment, **engine_config(plan)}, indent=2) + "\n"
