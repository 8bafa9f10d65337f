"""Gradient accumulation: plans that fit for any number of micro-batches.

Accumulated gradients stay allocated during the next micro-batch. Without an effective
batch size a plan is therefore chosen by the memory of two micro-batches per step, and
recommended with one. From the third on the allocator may place tensors differently, so
that four are replayed as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from budgetfit.core.plan import ACCUMULATING, Alternative, Estimate
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from budgetfit.core.recipe import Recipe
    from budgetfit.planning.session import PlanningSession

_MIN_SHARE: Final = 0.02  # of the usable bytes, for gradients to count
_MANY: Final = 4  # from there on every micro-batch allocates as the one before


def planned_accumulation(
    effective_batch_size: int | None, *, optimizer_in_backward: bool
) -> int | None:
    """Return the micro-batches per step to plan for; None: as requested."""
    # With two, gradients outlive a micro-batch, as with any larger number.
    asked = effective_batch_size is not None or optimizer_in_backward
    return None if asked else 2


def recommend_one_micro_batch(
    session: PlanningSession, estimate: Estimate
) -> tuple[Estimate, tuple[Alternative, ...], tuple[str, ...]]:
    """Return the plan with one micro-batch per step, if more fit as well.

    Returns:
        The estimate of one micro-batch per step, the row of several, and a note; the
        unchanged estimate where accumulation was requested or is impossible.
    """
    settings, recipe = session.settings, estimate.recipe
    if settings.effective_batch_size is not None or recipe.optimizer_in_backward:
        return estimate, (), ()
    if settings.accumulation is None:
        note = (
            "gradient_accumulation_steps has to stay 1: with gradients that outlive a "
            "micro-batch it would not fit, or cannot be traced"
        )
        return estimate, (), (note,)
    once = session.judge(replace(recipe, gradient_accumulation_steps=1))
    if not once.fits:  # gradients freed in each step may fragment more
        note = (
            f"planned with {recipe.gradient_accumulation_steps} micro-batches per "
            f"step: with one, {format_bytes(once.reserved_bytes)} would be reserved"
        )
        return estimate, (), (note,)
    row = Alternative(label=ACCUMULATING, estimate=estimate, fits=True)
    many = session.judge(replace(recipe, gradient_accumulation_steps=_MANY))
    reserved = format_bytes(max(estimate.reserved_bytes, many.reserved_bytes))
    if many.fits:
        several = recipe.parallelism
        how = " with sync_each_batch=True" * bool(several and several.sync_each_batch)
        note = (
            "no effective batch size was given: any gradient_accumulation_steps fits"
            f"{how} ({reserved} reserved from 2 on)"
        )
        if _gradients_count(session, recipe):
            note += "; plan.details() (--details) says whether exactly one is faster"
    else:
        note = (
            "gradient_accumulation_steps may be 1 or 2: with more, "
            f"{reserved} would be reserved; plan with effective_batch_size= for more"
        )
    return once, (row,), (note,)


def _gradients_count(session: PlanningSession, recipe: Recipe) -> bool:
    """Whether a plan for one micro-batch may be faster: it frees less for gradients."""
    gives_up = bool(recipe.segments) or recipe.loss_chunks > 1
    if recipe.parallelism is not None or not gives_up:
        return False
    least_bytes = _MIN_SHARE * session.budget.usable_bytes
    return session.block_chain.gradient_bytes > least_bytes
