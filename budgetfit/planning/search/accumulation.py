"""Plans that hold however many micro-batches a user accumulates.

Gradients that outlive a micro-batch take memory through the whole of the next one.
Where no effective batch size is given, a plan is therefore chosen by what two
micro-batches per step take, and recommended with one. From the third on the allocator
may place tensors otherwise: what four take is looked at before anything is promised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from budgetfit.core.plan import ACCUMULATING, Alternative
from budgetfit.planning.profiling.block_chain import Chains
from budgetfit.planning.search.search import judged
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate

_MANY: Final = 4  # from there on every micro-batch finds what the one before found


def accumulation_to_plan_for(
    effective_batch_size: int | None, *, optimizer_in_backward: bool
) -> int | None:
    """Return the micro-batches per step whose memory decides; None: as asked for.

    With two, gradients outlive a micro-batch, as with any larger number.
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
    if not once.fits:  # gradients that come and go can leave more gaps
        note = (
            f"planned with {recipe.gradient_accumulation_steps} micro-batches per "
            f"step: with one, {format_bytes(once.reserved_bytes)} would be reserved"
        )
        return estimate, (), (note,)
    row = Alternative(label=ACCUMULATING, estimate=estimate, fits=True)
    more = replace(recipe, gradient_accumulation_steps=_MANY)
    many = judged(chains, more, budget)
    reserved = format_bytes(max(estimate.reserved_bytes, many.reserved_bytes))
    if many.fits:
        note = (
            "no effective batch size was given: any gradient_accumulation_steps fits, "
            f"with {reserved} reserved from 2 on"
        )
    else:
        note = (
            "gradient_accumulation_steps may be 1 or 2: with more, "
            f"{reserved} would be reserved; plan with effective_batch_size= for more"
        )
    return once, (row,), (note,)


def one_micro_batch(candidates: Sequence[Chains]) -> list[Chains]:
    """Return chains without accumulation: gradients come and go, which leaves room."""
    return [
        Chains(each.traces, replace(each.setting, accumulation=None))
        for each in candidates
    ]
