"""Several GPUs in other libraries' settings, and which libraries have none."""

from collections.abc import Collection
from typing import Any, Final

from budgetfit.applying.zero import deepspeed_config
from budgetfit.core.parallelism import BACKENDS, Engine, Parallelism
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.errors import InputError
from budgetfit.utils.format_bytes import format_bytes

_CONTAINERS: Final = ("ModuleList", "ModuleDict")  # without a forward


def refuse_several_gpus(
    plan: Plan, program: str, *, but: Collection[Engine] = ()
) -> None:
    """Refuse a plan for several GPUs, ``but`` for engines of which it is written."""
    parallelism = plan.recipe.parallelism
    if parallelism is not None and parallelism.engine not in but:
        raise InputError(
            f"The plan is for {parallelism.engine} on {parallelism.gpus} GPUs, which "
            f"is not written for {program}. Use "
            f"{_instead(plan, libraries='--to trainer or --to accelerate')}."
        )


def _instead(plan: Plan, *, libraries: str = "") -> str:
    """Return what trains a plan; ``libraries``: exports that have not been tried."""
    script = libraries if plan.adapter else "--to torch, a script for torchrun"
    by_apply = "budgetfit.apply(plan, model) under torchrun"
    return f"{script}, or {by_apply}" if script else by_apply


def zero_settings(plan: Plan) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a plan for it."""
    return {
        **deepspeed_config(plan.recipe),
        "gradient_accumulation_steps": plan.recipe.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
    }


def yaml_settings(plan: Plan, program: str) -> dict[str, Any]:
    """Return what the YAML file of a program has for several GPUs; {} for one.

    Raises:
        InputError: If it has no such setting.
    """
    parallelism = plan.recipe.parallelism
    if parallelism is None:
        return {}
    reduced = trainer_reduction(parallelism)
    if parallelism.engine == "fsdp2":
        found = fsdp_settings(plan, parallelism, program)
        return {"fsdp_version": found.pop("version"), "fsdp_config": found, **reduced}
    return {**trainer_ddp_settings(parallelism), **reduced}


def trainer_fsdp(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what ``TrainingArguments`` has for accelerate's settings of FSDP2."""
    if "offload_params" not in settings:
        return {"fsdp_config": settings}
    config = {key: item for key, item in settings.items() if key != "offload_params"}
    # Gradients are clipped to a norm that ranks add up in host memory.
    return {
        "fsdp_config": {**config, "cpu_offload": True},
        "ddp_backend": BACKENDS,
    }


def trainer_reduction(parallelism: Parallelism) -> dict[str, Any]:
    """Return what ``TrainingArguments`` has for when gradients are reduced."""
    if not parallelism.sync_each_batch:
        return {}
    each = {"sync_each_batch": True}
    return {"accelerator_config": {"gradient_accumulation_kwargs": each}}


def trainer_ddp_settings(parallelism: Parallelism) -> dict[str, Any]:
    """Return what transformers' ``TrainingArguments`` has for DDP."""
    found: dict[str, Any] = {"ddp_find_unused_parameters": False}
    if parallelism.bucket_cap_mb is not None:
        found["ddp_bucket_cap_mb"] = parallelism.bucket_cap_mb
    return found


def copied_gradients(plan: Plan) -> list[str]:
    """Return what gradients take that are no views of DDP's buckets, as a remark.

    For a library without a setting for ``gradient_as_bucket_view``.

    Raises:
        InputError: If that does not fit.
    """
    parallelism = plan.recipe.parallelism
    if parallelism is None or not parallelism.gradient_as_bucket_view:
        return []
    size = 2 if find_precision(plan.recipe.precision).weights == "bf16" else 4
    more = size * plan.model.trainable_count
    needed, usable = plan.estimate.reserved_bytes + more, plan.budget.usable_bytes
    found = (
        "The Trainer has no gradient_as_bucket_view: its gradients take "
        f"{format_bytes(more)} more than predicted"
    )
    if needed > usable:
        raise InputError(
            f"{found}, {format_bytes(needed)} reserved in all, and "
            f"{format_bytes(usable)} are usable. Use {_instead(plan)}."
        )
    return [f"{found}."]


def fsdp_settings(plan: Plan, parallelism: Parallelism, program: str) -> dict[str, Any]:
    """Return accelerate's settings of FSDP2, by their names without ``fsdp_``.

    Raises:
        InputError: If it has no such setting, or cannot name the blocks by class.
    """
    others = {
        "shard": parallelism.shard,
        "reshard_after_forward": type(parallelism.reshard_after_forward) is int,
    }
    for name, is_used in others.items():
        if is_used:
            raise InputError(
                f"{program} has no setting for {name}={getattr(parallelism, name)} of "
                f"fully_shard. Use {_instead(plan)}."
            )
    return {
        "version": 2,
        "reshard_after_forward": parallelism.reshard_after_forward,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ",".join(_block_classes(plan, program)),
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": False,
        **({"offload_params": True} if parallelism.cpu_offload else {}),
    }


def _block_classes(plan: Plan, program: str) -> tuple[str, ...]:
    """Return the classes of all blocks: one of another is in the group of the root.

    Raises:
        InputError: If they are unknown, or one is a list, which cannot be wrapped.
    """
    model = plan.model
    lists = {name.rpartition(".")[0] for name in model.blocks}
    if not model.block_types and len(lists) > 1:
        raise InputError(
            f"The plan was saved by an older version, with one class of its blocks, "
            f"{model.block_type}, and they are in {len(lists)} lists: "
            f"{', '.join(sorted(lists))}. Plan again, so that {program} is told all."
        )
    classes = model.block_types or (model.block_type,)
    containers = [name for name in classes if name in _CONTAINERS]
    if containers:
        raise InputError(
            f"{program} shards blocks by their class, and some of this model are a "
            f"{containers[0]}, which fully_shard takes only as a list. Use "
            f"{_instead(plan)}."
        )
    return classes


def refuse_cut_loss(plan: Plan, program: str) -> None:
    """Refuse a loss in parts under FSDP2 as accelerate sets it up."""
    # It shards the last norm and the output head together, apart from the model. The
    # backward of one part frees their weights, which recomputing the next one needs.
    parallelism, parts = plan.recipe.parallelism, plan.recipe.loss_chunks
    if parallelism is not None and parallelism.engine == "fsdp2" and parts > 1:
        raise InputError(
            f"The plan has output head and loss in {parts} parts, and {program} frees "
            "the head's weights after the first one: FSDP2 has them in a group of "
            f"their own there. Use --to lightning, {_instead(plan)}; or plan with "
            "--checkpointing full, which cuts no loss."
        )


def dtype_lines(plan: Plan) -> list[str]:
    """Return what accelerate computes in other dtypes than planned, as remarks."""
    parallelism = plan.recipe.parallelism
    half = find_precision(plan.recipe.precision).autocast
    if parallelism is None or parallelism.engine != "fsdp2" or half is None:
        return []
    planned = parallelism.param_dtype or "fp32", parallelism.reduce_dtype or "fp32"
    if planned == (half, half):
        return []
    gathered, reduced = planned
    remark = (
        f"accelerate gathers weights and reduces gradients in {half}; planned: "
        f"{gathered} and {reduced}, which takes more memory."
    )
    return [remark]
