"""Plans that hold however many micro-batches a user accumulates.

Gradients that outlive a micro-batch take memory through the whole of the next one.
Where no effective batch size is given, a plan is therefore chosen by what two
micro-batches per step take, and recommended with one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.core.byte_text import format_bytes
from budgetfit.core.plan import ACCUMULATING, Alternative
from budgetfit.planning.chains import Chains
from budgetfit.planning.search import judged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate


def accumulation_to_plan_for(
    effective_batch_size: int | None, *, optimizer_in_backward: bool
) -> int | None:
    """Return the micro-batches per step whose memory decides; None: as asked for.

    Two take as much as any larger number: gradients outlive a micro-batch.
    """
    asked = effective_batch_size is not None or optimizer_in_backward
    return None if asked else 2


def without_accumulation(
    chains: Chains, estimate: Estimate, budget: Budget
) -> tuple[Estimate, tuple[Alternative, ...], tuple[str, ...]]:
    """Return a plan for accumulation with one micro-batch, and what to say of it.

    Returns:
        The estimate of one micro-batch per step, the row of several, and a note; the
        estimate as it is where accumulation was asked for or is out of the question.
    """
    setting, recipe = chains.setting, estimate.recipe
    if setting.effective_batch_size is not None or recipe.optimizer_in_backward:
        return estimate, (), ()
    if setting.accumulation is None:
        note = (
            "gradient_accumulation_steps has to stay 1: with gradients that outlive a "
            "micro-batch it would not fit, or cannot be traced"
        )
        return estimate, (), (note,)
    once = judged(chains, replace(recipe, gradient_accumulation_steps=1), budget)
    reserved = format_bytes(estimate.reserved_bytes)
    if not once.fits:  # gradients that come and go can leave more gaps
        note = (
            f"planned with {recipe.gradient_accumulation_steps} micro-batches per "
            f"step: with one, {format_bytes(once.reserved_bytes)} would be reserved"
        )
        return estimate, (), (note,)
    note = (
        "no effective batch size was given: any gradient_accumulation_steps fits, with "
        f"{reserved} reserved from 2 on"
    )
    row = Alternative(label=ACCUMULATING, estimate=estimate, fits=True)
    return once, (row,), (note,)


def one_micro_batch(candidates: Sequence[Chains]) -> list[Chains]:
    """Return chains without accumulation: gradients come and go, which leaves room."""
    return [
        Chains(each.traces, replace(each.setting, accumulation=None))
        for each in candidates
    ]
