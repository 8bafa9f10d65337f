"""Whether the output head and the loss are cut into parts: where that pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from budgetfit.applying.chunked_loss import can_chunk_loss
from budgetfit.core.errors import InputError, TraceError
from budgetfit.planning.search import Found, Request, rank, search

if TYPE_CHECKING:
    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.planning.chains import Chains

# More parts hold less and launch smaller kernels; eight leave an eighth of the logits.
LOSS_PARTS: Final = 8
# Where head and loss hold less of the budget than this at their worst, cutting them can
# win next to nothing and is not tried.
LEAST_SHARE: Final = 0.05
# A loss in parts replaces the model's own: it has to gain this much.
LEAST_GAIN: Final = 0.01


def search_with_loss_parts(
    chains: Chains, request: Request, budget: Budget
) -> tuple[Chains, Found]:
    """Return what was found with the whole loss, or in parts where that is better.

    Parts run the head once more in the backward pass and never hold all logits. They
    are tried where checkpointing is free to choose.
    """
    whole = search(chains, request, budget)
    if request.checkpointing != "auto" or not _worth_trying(chains, whole, budget):
        return chains, whole
    cut = chains.with_loss_chunks(LOSS_PARTS)
    try:
        in_parts = search(cut, request, budget)
    except (InputError, TraceError) as error:
        chains.traces.log.append(f"the loss is not cut into parts: {error}")
        return chains, whole
    if in_parts.estimate is None:
        return chains, whole
    if whole.estimate is None or _gains(in_parts.estimate, whole.estimate, request):
        return cut, in_parts
    return chains, whole


def _worth_trying(chains: Chains, whole: Found, budget: Budget) -> bool:
    subject = chains.traces.subject
    if not can_chunk_loss(subject.model, subject.loss):
        return False
    size = whole.estimate.recipe.batch_size if whole.estimate is not None else 1
    behind = chains.at(size).blocks[-1].keep
    most = max(behind.forward_bytes, behind.saved_bytes + behind.backward_bytes)
    return most >= LEAST_SHARE * budget.usable_bytes


def _gains(new: Estimate, old: Estimate, request: Request) -> bool:
    first, second = (rank(each, request.objective)[0] for each in (new, old))
    return first < second - LEAST_GAIN * abs(second)
