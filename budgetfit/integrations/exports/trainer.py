"""transformers' ``Trainer``: a callback that applies a plan, and a training script."""

import warnings
from typing import Any, Final

from torch import nn
from transformers import TrainerCallback

from budgetfit.applying.run.num_items_in_batch import trainer_sums_losses
from budgetfit.applying.undo import Undo
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.errors import InputError
from budgetfit.integrations.exports.prepared_model import (
    PreparedModel,
    cast_weights,
    find_planned,
)
from budgetfit.integrations.exports.trainer_arguments import settings
from budgetfit.integrations.exports.trainer_script import ScriptParts, program_text
from budgetfit.integrations.exports.trl import has_fused_head, has_pairs
from budgetfit.integrations.exports.watched_loop import (
    other_optimizer,
    warn_of_settings,
)
from budgetfit.workload.settings_check import warn_changed_settings


class PlanCallback(TrainerCallback):
    """Trainer callback that applies a plan to the model, and restores it afterwards.

    Weights get the planned dtype when the Trainer is created, before an optimizer state
    is loaded; checkpointing and chunked loss are applied when training begins, after
    the Trainer's own setup, and undone when it ends. After an error in training, call
    ``undo()``.

    Raises:
        InputError: From the Trainer's constructor, if its model is not the planned one.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._prepared: PreparedModel | None = None

    def undo(self) -> None:
        """Restore the model; weights keep the dtype they were trained in."""
        if self._prepared is not None:
            self._prepared.undo()
            self._prepared = None

    def on_init_end(
        self, *_: object, model: nn.Module | None = None, **__: object
    ) -> None:
        """Cast the weights to the planned dtype."""
        if model is None:
            return
        policy = find_precision(self._plan.recipe.precision)
        planned = find_planned(self._plan, model)
        if any(hasattr(each, "ds_numel") for each in planned.parameters()):
            return  # loaded in parts, zero.Init: DeepSpeed has chosen their dtype
        with Undo() as undo:
            cast_weights(planned, policy, undo, sets_tf32=False)
        undo()  # of buffers; applied again when training begins

    def on_train_begin(
        self, args: object, *_: object, model: Any = None, **kwargs: object
    ) -> None:
        """Apply checkpointing and chunked loss."""
        self.undo()  # auto_find_batch_size begins training several times
        _check_arguments(self._plan, args, kwargs.get("optimizer"))
        planned = find_planned(self._plan, model)
        warn_changed_settings(self._plan, planned)
        _warn_of_summed_losses(self._plan, args, planned)
        self._prepared = PreparedModel(
            self._plan,
            planned,
            chunks_loss=not has_fused_head(planned),
            casts_weights=self._plan.recipe.zero_stage is None,
            by_arguments=True,
        )

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Apply checkpointing again if something has replaced it meanwhile."""
        if self._prepared is not None and self._prepared.restore():
            warnings.warn(
                "Something switched checkpointing on or off during training; the "
                "planned blocks are recomputed again.",
                stacklevel=2,
            )

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        """Empty the cache after what compiled, before optimizer states fill it."""
        if self._prepared is not None:
            self._prepared.after_backward()

    on_substep_end = on_pre_optimizer_step  # a micro-batch that updates nothing

    def on_train_end(self, *_: object, **__: object) -> None:
        """Restore the model."""
        self.undo()


def _check_arguments(plan: Plan, args: Any, optimizer: Any) -> None:
    """Warn of arguments unlike the plan's; refuse one process on several GPUs."""
    if args.n_gpu > 1:
        raise InputError(
            f"The Trainer would share {args.n_gpu} cards out inside one process "
            "(nn.DataParallel), and the plan is for one card. Show it one "
            "(CUDA_VISIBLE_DEVICES=0), or start one process per card with accelerate "
            "launch."
        )
    planned = settings(plan)
    pairs = args.per_device_train_batch_size if has_pairs(args) else 0
    sequences = plan.recipe.batch_size
    if pairs:
        del planned["per_device_train_batch_size"]
    other = [
        f"{name}={getattr(args, name)} (planned: {value})"
        for name, value in planned.items()
        if getattr(args, name) != value
    ]
    if pairs and 2 * pairs != sequences:
        other.append(
            f"per_device_train_batch_size={pairs}, pairs of two sequences each "
            f"(planned: {sequences} sequences)"
        )
    if optimizer is not None:
        chosen = getattr(args.optim, "value", args.optim)
        other += other_optimizer(plan.recipe, optimizer, chosen)
    if args.label_smoothing_factor and "labels" in plan.model.batch:
        # Log-probabilities of all tokens are kept once more.
        other.append(
            f"label_smoothing_factor={args.label_smoothing_factor} (planned: 0.0)"
        )
    if getattr(args, "torch_compile", False):
        other.append(f"torch_compile=True (planned: compile={plan.recipe.compile!r})")
    if plan.recipe.engine == "fsdp2" and plan.recipe.reduction and not _syncs(args):
        other.append(
            "gradients whole on each rank until the last micro-batch (planned: "
            "accelerator_config with sync_each_batch=True)"
        )
    if args.world_size != plan.recipe.ranks:
        other.append(f"{args.world_size} processes (planned: {plan.recipe.ranks})")
    warn_of_settings(other)


def _syncs(args: Any) -> bool:
    """Whether the Trainer reduces gradients in each micro-batch."""
    given = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None)
    return bool((given or {}).get("sync_each_batch"))


def _warn_of_summed_losses(plan: Plan, args: Any, model: nn.Module) -> None:
    several = args.gradient_accumulation_steps * args.world_size > 1
    is_trainers = type(args).__module__.startswith("transformers.")  # TRL's are right
    if (
        several
        and is_trainers
        and "labels" in plan.model.batch
        and trainer_sums_losses(model)
    ):
        warnings.warn(
            f"The Trainer adds up the losses that {type(model).__name__} computes over "
            "the micro-batches of an update, and they are means: gradients are that "
            "many times larger than planned. Set model.accepts_loss_kwargs = False "
            "before the Trainer is made (of a PEFT model, on model.get_base_model()). "
            "Label smoothing and a compute_loss_func that divide by num_items_in_batch "
            "need nothing.",
            stacklevel=2,
        )


def export_text(plan: Plan, plan_file: str) -> str:
    """Return a Python program that loads the model and trains it.

    Raises:
        InputError: If the Trainer cannot build the plan's optimizer by its name.
    """
    return program_text(plan, plan_file, _PROGRAM)


_PROGRAM: Final = ScriptParts(
    what="A Trainer",
    library="transformers",
    trainer="Trainer",
    arguments="TrainingArguments",
)
