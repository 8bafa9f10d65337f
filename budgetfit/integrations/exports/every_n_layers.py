"""Whether transformers' own two arguments say what a plan recomputes.

``activation_checkpointing`` and ``activation_checkpointing_kwargs={"every_n_layers":
n}`` (transformers 5.23: trainer.py, modeling_utils.py) recompute every n-th layer of
those that are a ``GradientCheckpointingLayer``, in the order of ``modules()``. A plan
that this is enough for needs no callback.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.errors import BudgetfitError
from budgetfit.integrations.source_code.plain_torch import planned_model
from budgetfit.planning.search.every_nth_block import ordinal, which_nth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.core.plan import Alternative, Estimate

MOST_SLOWER: Final = 0.01  # than the plan, for settings that need no budgetfit
_PEFT: Final = "base_model.model."


@dataclass(frozen=True, slots=True)
class PlainCheckpointing:
    """Settings that need no callback.

    Attributes:
        plan: Whose settings they are: the plan itself, or it with the recipe and the
            estimate of an alternative.
        every: Every how manieth block is recomputed; 0 for none.
        remark: How it compares with the plan; empty if it is the plan.
    """

    plan: Plan
    every: int
    remark: str = ""


def plain_checkpointing(
    plan: Plan, *, cuts_loss: bool = False
) -> PlainCheckpointing | None:
    """Return settings of the Trainer that do what is planned by themselves.

    Those of the plan, or of an alternative that was judged to fit, takes at most 1 %
    more time for the same samples per optimizer step, and changes nothing of the
    training.

    Args:
        plan: Saved or just made; its alternatives are looked at only where the plan
            itself cannot be said.
        cuts_loss: Whether the library cuts the loss into parts itself.
    """
    if _needs_more_than_checkpointing(plan):
        return None
    for estimate in _candidates(plan):
        recipe = estimate.recipe
        every = which_nth(recipe.segments, plan.model.blocks)
        if every is None or (recipe.loss_chunks > 1 and not cuts_loss):
            continue
        if every and not _counted_alike(plan, every):
            continue
        if estimate is plan.estimate:
            return PlainCheckpointing(plan, every)
        same = replace(estimate, eval_batch_size=plan.estimate.eval_batch_size)
        other = plan.changed(recipe=recipe, estimate=same)
        return PlainCheckpointing(other, every, _remark(plan, estimate, every))
    return None


def _candidates(plan: Plan) -> Iterator[Estimate]:
    yield plan.estimate
    samples = plan.recipe.effective_batch_size
    rows = [
        estimate
        for row in plan.alternatives
        if _replaces(plan, row)
        and (estimate := row.estimate.with_samples(samples)) is not None
    ]
    yield from sorted(rows, key=lambda row: -row.samples_per_s)


def _replaces(plan: Plan, row: Alternative) -> bool:
    slowest = plan.comparable.samples_per_s / (1 + MOST_SLOWER)
    return row.fits and not row.is_suggestion and row.estimate.samples_per_s >= slowest


def _remark(plan: Plan, estimate: Estimate, every: int) -> str:
    slower = plan.comparable.samples_per_s / estimate.samples_per_s - 1
    what = "every block" if every == 1 else f"every {ordinal(every)} block"
    return (
        f"Not the plan's own choice, but simpler, judged to fit too and {slower:+.1%} "
        f"slower: {what if every else 'nothing'} is recomputed, by transformers itself."
    )


def _needs_more_than_checkpointing(plan: Plan) -> bool:
    """Whether dtypes or the optimizer take more than loading and arguments."""
    if plan.recipe.optimizer_in_backward:
        return True
    if find_precision(plan.recipe.precision).weights != "bf16":
        return False
    # Fractional inputs must be cast, and quantised bases keep fp32 that the plan casts.
    floats = [name for name, (_, dtype) in plan.model.batch.items() if "float" in dtype]
    return bool(floats) or plan.adapter is not None


def _counted_alike(plan: Plan, every: int) -> bool:
    """Whether transformers would recompute the blocks that the plan does.

    Seen on the model itself, built without weights; False where it cannot be had.
    """
    text = (plan.provenance.get("asked") or {}).get("model") or ""
    try:
        model: Any = planned_model(plan, text)
    except (BudgetfitError, OSError):
        return False
    enable = getattr(model, "activation_checkpointing_enable", None)
    if not getattr(model, "supports_gradient_checkpointing", False) or enable is None:
        return False
    if every > 1 and "every_n_layers" not in inspect.signature(enable).parameters:
        return False
    found = [
        name.removeprefix(_PEFT)
        for name, module in model.named_modules()
        if any(
            cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__
        )
    ]
    wanted = [name.removeprefix(_PEFT) for name in plan.model.blocks[::every]]
    return set(found[::every]) == set(wanted)
