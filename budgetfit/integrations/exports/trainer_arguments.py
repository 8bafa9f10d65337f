"""Map a plan to transformers' ``TrainingArguments`` and its subclasses."""

import dataclasses
from collections.abc import Collection
from typing import Any

from transformers import TrainingArguments

from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES, transformers_names
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.integrations.exports.ranks import (
    copied_gradients,
    fsdp_settings,
    refuse_cut_loss,
    trainer_ddp_settings,
    trainer_fsdp,
    trainer_reduction,
    zero_settings,
)
from budgetfit.integrations.source_code.python_source import exported_eval_batch_size


def training_arguments(plan: Plan, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for the installed ``TrainingArguments``.

    Raises:
        InputError: If it cannot express the plan's optimizer, or a loss in parts under
            FSDP2, or has no such argument.
    """
    refuse_cut_loss(plan, "the Trainer")
    return planned_arguments(plan, known_fields(), overrides)


def known_fields(kind: Any = TrainingArguments) -> set[str]:
    """Return the fields that the installed ``TrainingArguments``, or another, takes."""
    return {item.name for item in dataclasses.fields(kind) if item.init}


def planned_arguments(
    plan: Plan, known: Collection[str], overrides: dict[str, Any], every: int = 0
) -> dict[str, Any]:
    """Return a plan's arguments for a class with these fields.

    Checkpointing is disabled explicitly: some classes enable it for every block, and
    the callback applies the planned one. With ``every`` the library recomputes every
    n-th block itself.
    """
    recipe = plan.recipe
    wanted = {**settings(plan), "optim": recipe.optimizer}
    if find_precision(recipe.precision).tf32:
        wanted["tf32"] = True
    if (samples := exported_eval_batch_size(plan)) is not None:
        wanted["per_device_eval_batch_size"] = samples
        if "eval_accumulation_steps" in known:
            # With compute_metrics, predictions of all batches would accumulate on the
            # GPU.
            wanted["eval_accumulation_steps"] = 1
    # The first is the new name of the second, which is deprecated.
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if name in known:
            wanted[name] = every > 0
            if every:
                counted = {"every_n_layers": every} if every > 1 else {}
                wanted[f"{name}_kwargs"] = {"use_reentrant": False, **counted}
            break
    if recipe.optimizer_in_backward:
        wanted["max_grad_norm"] = 0.0  # gradients are freed before their norm is known
    wanted |= _several(plan)
    wanted |= overrides
    _check_names(wanted, known)
    _check_optimizer(wanted["optim"], recipe, chosen="optim" in overrides)
    return wanted


def _several(plan: Plan) -> dict[str, Any]:
    """Return the arguments of a plan for several GPUs, one process each.

    Raises:
        InputError: If the Trainer has none for it.
    """
    parallelism = plan.recipe.parallelism
    if parallelism is None:
        return {}
    found: dict[str, Any] = {}
    if parallelism.engine == "fsdp2":
        found["fsdp"] = True
        found |= trainer_fsdp(fsdp_settings(plan, parallelism, "The Trainer"))
    elif parallelism.engine == "deepspeed":
        # The Trainer's own max_grad_norm.
        found["deepspeed"] = {**zero_settings(plan), "gradient_clipping": "auto"}
    else:
        copied_gradients(plan)
        found |= trainer_ddp_settings(parallelism)
    return found | trainer_reduction(parallelism)


def settings(plan: Plan) -> dict[str, Any]:
    """Return the arguments that determine memory and effective batch size."""
    policy = find_precision(plan.recipe.precision)
    return {
        "per_device_train_batch_size": plan.recipe.batch_size,
        "gradient_accumulation_steps": plan.recipe.gradient_accumulation_steps,
        "bf16": policy.autocast == "bf16",
        "fp16": policy.autocast == "fp16",
    }


def exported(plan: Plan) -> tuple[dict[str, Any], str]:
    """Return overrides for an exported script, and its line for the optimizer.

    Where the Trainer cannot build the optimizer but the plan can, the script passes
    one; ``optim`` is then unused.

    Raises:
        InputError: If the Trainer takes none, as under FSDP (transformers 5.23,
            trainer.py).
    """
    recipe = plan.recipe
    is_known = recipe.optimizer in transformers_names()
    by_trainer = is_known and not recipe.optimizer_in_backward
    if by_trainer or recipe.optimizer not in OPTIMIZER_NAMES:
        return {}, ""
    if recipe.parallelism is not None and recipe.parallelism.engine == "fsdp2":
        raise InputError(
            f"The Trainer has no optimizer {recipe.optimizer!r} in its optim names, "
            "and under FSDP it takes no other. Use --to accelerate, or plan again "
            "with one of those names, for example --optimizer adamw_torch_fused."
        )
    made = "plan.make_optimizer(model.parameters(), lr=args.learning_rate)"
    return {"optim": "adamw_torch"}, f"        optimizers=({made}, None),\n"


def _check_names(wanted: dict[str, Any], known: Collection[str]) -> None:
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InputError(
            f"The installed library has no argument {', '.join(map(repr, unknown))}. "
            "Is it too old, or the name mistyped? What only another class takes goes "
            "beside these: RewardConfig(max_length=512, "
            "**plan.to_training_arguments())."
        )


def _check_optimizer(name: str, recipe: Recipe, *, chosen: bool) -> None:
    """Refuse an optimizer that the Trainer would not build as planned."""
    known = name in transformers_names()
    if known and (chosen or not recipe.optimizer_in_backward):
        return
    reason = (
        f"has no optimizer {name!r} in its optim names"
        if not known
        else f"steps {name} after the backward pass, and it was planned inside"
    )
    raise InputError(
        f"The installed Trainer {reason}. Build it yourself, Trainer(..., "
        "optimizers=(optimizer, None)) with "
        "optimizer = plan.make_optimizer(model.parameters()), and give optim a "
        'name that it then ignores: to_training_arguments(optim="adamw_torch").'
    )
