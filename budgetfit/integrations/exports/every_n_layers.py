"""Express a plan's checkpointing by transformers' own two arguments, where possible.

``activation_checkpointing`` and ``activation_checkpointing_kwargs={"every_n_layers":
n}`` (transformers 5.23: trainer.py, modeling_utils.py) recompute every n-th layer of
those that are a ``GradientCheckpointingLayer``, in the order of ``modules()``. Such a
plan needs no callback.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from budgetfit.core.plan import Alternative, Estimate, Plan
from budgetfit.core.precision import find_precision
from budgetfit.errors import BudgetfitError
from budgetfit.integrations.source_code.plain_torch import planned_model
from budgetfit.planning.search.policies import every_n_of_segments, ordinal

MAX_SLOWDOWN: Final = 0.01  # relative to the plan, for settings that need no budgetfit
_PRINTED: Final = 0.05  # percent, rounded to one decimal
_PEFT: Final = "base_model.model."


@dataclass(frozen=True, slots=True)
class TrainerCheckpointing:
    """Settings of transformers' ``Trainer`` that need no callback.

    Attributes:
        plan: The plan itself, or with the recipe and estimate of an alternative.
        every: Every n-th block is recomputed; 0 for none.
        remark: Comparison with the plan; empty if it is the plan.
    """

    plan: Plan
    every: int
    remark: str = ""


def trainer_checkpointing(
    plan: Plan, *, cuts_loss: bool = False
) -> TrainerCheckpointing | None:
    """Return Trainer settings that implement the plan without a callback, or None.

    Those of the plan, or of an alternative that fits, takes at most 1 % more time for
    the same effective batch size, and does not change training. What the user has asked
    for is not replaced: a policy, or the names of blocks. ``cuts_loss``: whether the
    library itself chunks the loss, as TRL does.
    """
    if _needs_more_than_checkpointing(plan, in_trl=cuts_loss):
        return None
    for estimate in _candidates(plan):
        recipe = estimate.recipe
        every = every_n_of_segments(recipe.segments, plan.model.blocks)
        if every is None or (recipe.loss_chunks > 1 and not cuts_loss):
            continue
        if every and not _selects_same_blocks(plan, every):
            continue
        if estimate is plan.estimate:
            return TrainerCheckpointing(plan, every)
        same = replace(estimate, eval_batch_size=plan.estimate.eval_batch_size)
        other = plan.changed(recipe=recipe, estimate=same)
        return TrainerCheckpointing(other, every, _remark(plan, estimate, every))
    return None


def _candidates(plan: Plan) -> Iterator[Estimate]:
    yield plan.estimate
    asked = plan.provenance.get("asked")
    if isinstance(asked, dict) and asked.get("checkpointing"):
        return
    samples = plan.recipe.effective_batch_size
    rows = [
        estimate
        for row in plan.alternatives
        if _replaces(plan, row)
        and (estimate := row.estimate.with_samples(samples)) is not None
    ]
    yield from sorted(rows, key=lambda row: -row.samples_per_s)


def _replaces(plan: Plan, row: Alternative) -> bool:
    slowest = plan.estimate.samples_per_s / (1 + MAX_SLOWDOWN)
    return row.fits and not row.is_suggestion and row.estimate.samples_per_s >= slowest


def _remark(plan: Plan, estimate: Estimate, every: int) -> str:
    mine, others = plan.estimate.samples_per_s, estimate.samples_per_s
    percent = 100 * (max(mine, others) / min(mine, others) - 1)
    speed = f"{percent:.1f} % {'faster' if others > mine else 'slower'}"
    what = "every block" if every == 1 else f"every {ordinal(every)} block"
    recomputed = f"{what} is recomputed, by transformers itself"
    return (
        "Not the plan's own choice, but simpler: "
        f"{recomputed if every else 'nothing is recomputed'}. Judged to fit too, and "
        f"{speed if percent >= _PRINTED else 'as fast'}."
    )


def _needs_more_than_checkpointing(plan: Plan, *, in_trl: bool) -> bool:
    """Whether dtypes, optimizer or compiled blocks need more than arguments."""
    # TRL 1.16 casts adapters on a quantised base to bf16 (trl/trainer/sft_trainer.py,
    # dpo_trainer.py); the callback casts them back to the planned dtype.
    if plan.recipe.optimizer_in_backward or plan.recipe.compile != "none":
        return True
    if in_trl and plan.adapter is not None and plan.adapter.quantization is not None:
        return True
    if find_precision(plan.recipe.precision).weights != "bf16":
        return False
    # Float inputs must be cast, and quantized bases keep fp32 that the plan casts.
    floats = [name for name, (_, dtype) in plan.model.batch.items() if "float" in dtype]
    return bool(floats) or plan.adapter is not None


def _selects_same_blocks(plan: Plan, every: int) -> bool:
    """Whether transformers would recompute the same blocks as the plan."""
    # Checked on the model, built on meta; False where it cannot be built.
    try:
        model: Any = planned_model(plan)
    except (BudgetfitError, OSError):
        return False
    enable = getattr(model, "activation_checkpointing_enable", None)
    if not getattr(model, "supports_gradient_checkpointing", False) or enable is None:
        return False
    if every > 1 and "every_n_layers" not in inspect.signature(enable).parameters:
        return False
    layers = {
        name.removeprefix(_PEFT): module
        for name, module in model.named_modules()
        if any(
            cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__
        )
    }
    found = list(layers)
    if any(_has_statistics(layers[name]) for name in found[::every]):
        return False
    wanted = [name.removeprefix(_PEFT) for name in plan.model.blocks[::every]]
    return set(found[::every]) == set(wanted)


def _has_statistics(layer: Any) -> bool:
    """Whether a layer has batch norms: run again by transformers, they count twice."""
    return any(
        getattr(module, "running_mean", None) is not None for module in layer.modules()
    )
