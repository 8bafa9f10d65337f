"""What gradient accumulation takes where a plan has one micro-batch per update.

Accumulated gradients stay allocated during the next micro-batch. From the third on the
allocator may place tensors differently, so that four are replayed as well as two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from budgetfit.core.plan import Alternative, Estimate
from budgetfit.errors import TraceError
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from budgetfit.planning.session import PlanningSession

ACCUMULATING: Final = "accumulating"
_MANY: Final = 4  # from there on every micro-batch allocates as the one before


def accumulation_row(
    session: PlanningSession, estimate: Estimate
) -> tuple[tuple[Alternative, ...], tuple[str, ...]]:
    """Return the row of two micro-batches per update, and a note of how many fit.

    Neither where the number was requested, or cannot be more than one.
    """
    settings, recipe = session.settings, estimate.recipe
    if settings.effective_batch_size is not None or recipe.optimizer_in_backward:
        return (), ()
    try:
        two, many = (
            session.judge(replace(recipe, gradient_accumulation_steps=steps))
            for steps in (2, _MANY)
        )
    except TraceError:
        note = "gradient_accumulation_steps has to stay 1: more cannot be traced"
        return (), (note,)
    reserved = format_bytes(max(two.reserved_bytes, many.reserved_bytes))
    several = recipe.parallelism
    how = " with sync_each_batch=True" * bool(several and several.sync_each_batch)
    if not two.fits:
        note = (
            f"gradient_accumulation_steps has to stay 1: with more, {reserved} would "
            "be reserved. With effective_batch_size= a plan accumulates"
        )
    elif many.fits:
        note = (
            "no effective batch size was given: any gradient_accumulation_steps fits"
            f"{how} ({reserved} reserved from 2 on)"
        )
    else:
        note = (
            "gradient_accumulation_steps may be 1 or 2: with more, "
            f"{reserved} would be reserved; plan with effective_batch_size= for more"
        )
    larger = f"another update: effective_batch_size={two.recipe.effective_batch_size}"
    row = Alternative(
        label=ACCUMULATING, estimate=two, fits=bool(two.fits), note=larger
    )
    return (row,), (note,)
