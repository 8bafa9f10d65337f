"""accelerate: export a plan as a config file for ``accelerate launch``."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from textwrap import indent
from typing import TYPE_CHECKING, Any

from budgetfit.core.precision import find_precision
from budgetfit.integrations.exports.diffusers_options import script_lines
from budgetfit.integrations.optional_imports import import_attribute
from budgetfit.integrations.source_code.model_loading import load_model_text
from budgetfit.integrations.source_code.python_source import (
    import_block,
    plan_summary_lines,
    to_source,
)

if TYPE_CHECKING:
    from budgetfit.core.plan import Plan

_CONFIG_HOME = "accelerate.commands.config.config_args"


def launch_config(plan: Plan) -> dict[str, Any]:
    """Return the content of a config file: one process on one GPU.

    Where accelerate is installed, only fields of its ``ClusterConfig``: it rejects
    files with others.
    """
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": find_precision(plan.recipe.precision).autocast or "no",
        "num_machines": 1,
        "num_processes": 1,
        "machine_rank": 0,
        "main_training_function": "main",
        "downcast_bf16": False,
        "use_cpu": False,
        "debug": False,
    }
    if find_spec("accelerate") is not None:
        known = dataclasses.fields(import_attribute(_CONFIG_HOME, "ClusterConfig"))
        names = {item.name for item in known}
        config = {name: value for name, value in config.items() if name in names}
    return config


def export_text(plan: Plan, plan_file: str) -> str:
    """Return a YAML file; its comments contain the lines that the script needs."""
    steps = plan.recipe.gradient_accumulation_steps
    loading = load_model_text(plan)
    imports = import_block(
        {*loading.modules, "budgetfit"},
        [
            ("accelerate", "Accelerator"),
            ("torch.utils.data", "DataLoader"),
            *loading.names,
        ],
    )
    script = [
        "",
        "accelerate launch --config_file accelerate.yaml train.py",
        "",
        "In train.py, before accelerator.prepare(...):",
        *indent(
            f"{imports}\n{loading.constants}\n{loading.code}", " " * 4
        ).splitlines(),
        "",
        "    model = load_model()",
        f"    plan = budgetfit.Plan.load({to_source(plan_file)})",
        "    plan.prepare(model)  # recomputes the planned blocks",
        "    optimizer = plan.make_optimizer(model.parameters(), lr=5e-5)",
        f"    loader = DataLoader(dataset, batch_size={plan.recipe.batch_size})",
        f"    accelerator = Accelerator(gradient_accumulation_steps={steps})",
    ]
    comments = [
        *plan_summary_lines(plan, "A launch of accelerate"),
        *script,
        *script_lines(plan),
    ]
    lines = [f"# {line}".rstrip() for line in comments]
    # JSON values are valid YAML.
    values = launch_config(plan).items()
    lines += [f"{name}: {json.dumps(value)}" for name, value in values]
    return "\n".join(lines) + "\n"
