"""accelerate: export a plan as a config file for ``accelerate launch``."""

import dataclasses
import json
from importlib.util import find_spec
from textwrap import indent
from typing import Any

from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.errors import InputError
from budgetfit.integrations.exports.diffusers_options import script_lines
from budgetfit.integrations.exports.ranks import (
    dtype_lines,
    fsdp_settings,
    refuse_cut_loss,
)
from budgetfit.integrations.optional_imports import import_attribute
from budgetfit.integrations.source_code.model_loading import load_model_text
from budgetfit.integrations.source_code.plain_torch_ranks import ddp_settings
from budgetfit.integrations.source_code.python_source import (
    call_source,
    import_block,
    plan_summary_lines,
    to_source,
)

_CONFIG_HOME = "accelerate.commands.config.config_args"


def launch_config(plan: Plan) -> dict[str, Any]:
    """Return the content of a config file: one process for each planned GPU.

    Where accelerate is installed, only fields of its ``ClusterConfig``: it rejects
    files with others.

    Raises:
        InputError: If accelerate has no setting for the plan's ``fully_shard``, or
            would cut a loss that FSDP2 cannot.
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
        **_several(plan),
    }
    if find_spec("accelerate") is not None:
        known = dataclasses.fields(import_attribute(_CONFIG_HOME, "ClusterConfig"))
        names = {item.name for item in known}
        config = {name: value for name, value in config.items() if name in names}
    return config


def _several(plan: Plan) -> dict[str, Any]:
    """Return the settings of a launch on several GPUs."""
    parallelism = plan.recipe.parallelism
    if parallelism is None:
        return {}
    found: dict[str, Any] = {
        "distributed_type": "MULTI_GPU",
        "num_machines": parallelism.nodes,
        "num_processes": parallelism.gpus,
    }
    if parallelism.nodes > 1:
        found |= {"main_process_ip": "HOST", "main_process_port": 29500}
    if parallelism.engine == "fsdp2":
        refuse_cut_loss(plan, "accelerate")
        settings = fsdp_settings(plan, parallelism, "accelerate")
        found["distributed_type"] = "FSDP"
        found["fsdp_config"] = {f"fsdp_{key}": item for key, item in settings.items()}
    elif parallelism.engine == "deepspeed":
        found["distributed_type"] = "DEEPSPEED"
        found["deepspeed_config"] = _zero(plan, parallelism)
    return found


def _zero(plan: Plan, parallelism: Parallelism) -> dict[str, Any]:
    """Return accelerate's settings of DeepSpeed, which has its defaults for others.

    Raises:
        InputError: If it has no such setting.
    """
    for name in ("bucket_elements", "overlap_comm"):
        value = getattr(parallelism, name)
        if value is not None:
            raise InputError(
                f"accelerate has no setting for {name}={value}. Use --to deepspeed, "
                "and name that file: accelerate launch --deepspeed_config_file."
            )
    # Without it each machine runs the ``deepspeed`` command, which waits for no other.
    several = {"deepspeed_multinode_launcher": "standard"}
    return {
        **(several if parallelism.nodes > 1 else {}),
        "zero_stage": parallelism.zero_stage,
        "gradient_accumulation_steps": plan.recipe.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
    }


def export_text(plan: Plan, plan_file: str) -> str:
    """Return a YAML file; its comments contain the lines that the script needs."""
    loading = load_model_text(plan)
    accelerator, names = _accelerator(plan)
    imports = import_block(
        {*loading.modules, "budgetfit"},
        [
            ("accelerate", "Accelerator"),
            ("torch.utils.data", "DataLoader"),
            *loading.names,
            *names,
        ],
    )
    several = plan.recipe.parallelism
    machines = (
        ["On each machine, with its machine_rank and the first one's name for HOST:"]
        if several is not None and several.nodes > 1
        else []
    )
    samples = f"dataset, batch_size={plan.recipe.batch_size}"
    script = [
        "",
        *machines,
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
        f"    loader = DataLoader({samples}, shuffle=True)",
        *accelerator,
    ]
    comments = [
        *plan_summary_lines(plan, "A launch of accelerate"),
        *script,
        *script_lines(plan),
        *dtype_lines(plan),
    ]
    lines = [f"# {line}".rstrip() for line in comments]
    # JSON values are valid YAML.
    values = launch_config(plan).items()
    lines += [f"{name}: {json.dumps(value)}" for name, value in values]
    return "\n".join(lines) + "\n"


def _accelerator(plan: Plan) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the lines that make the Accelerator, and what they import."""
    steps = plan.recipe.gradient_accumulation_steps
    parallelism = plan.recipe.parallelism
    arguments, names = [f"gradient_accumulation_steps={steps}"], []
    if parallelism is not None and parallelism.sync_each_batch:
        names.append(("accelerate.utils", "GradientAccumulationPlugin"))
        made = f"GradientAccumulationPlugin(num_steps={steps}, sync_each_batch=True)"
        arguments = [f"gradient_accumulation_plugin={made}"]
    if parallelism is not None and ddp_settings(parallelism):
        names.append(("accelerate", "DistributedDataParallelKwargs"))
        options = [f"{key}={item}" for key, item in ddp_settings(parallelism).items()]
        made = f"DistributedDataParallelKwargs({', '.join(options)})"
        arguments.append(f"kwargs_handlers=[{made}]")
    code = call_source("Accelerator", arguments, 4, len("accelerator = "))
    return f"    accelerator = {code}".splitlines(), names
