"""Whether the output head and the loss are cut into parts: where that pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from budgetfit.applying.loss.chunked_loss import can_chunk_loss
from budgetfit.errors import InputError, TraceError
from budgetfit.planning.search.search import MOST_ROUNDS, Found, Request, rank, search

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.planning.profiling.block_chain import Chains

# More parts hold less and launch smaller kernels: the first that leave little to gain.
LOSS_PARTS: Final = (8, 64, 256)
# Where head and loss hold less of the budget than this at their worst, cutting them can
# win next to nothing and is not tried.
LEAST_SHARE: Final = 0.05
# A loss in parts replaces the model's own: it has to gain this much.
LEAST_GAIN: Final = 0.01


def search_with_loss_parts(
    chains: Chains, request: Request, budget: Budget, most_rounds: int = MOST_ROUNDS
) -> tuple[Chains, Found]:
    """Return what was found with the whole loss, or in parts where that is better.

    Parts run the head once more in the backward pass and never hold all logits. They
    are tried where checkpointing is free to choose.
    """
    best = chains, search(chains, request, budget, most_rounds=most_rounds)
    for cut in _in_parts(chains, request, budget, best[1].estimate):
        try:
            found = search(cut, request, budget, most_rounds=most_rounds)
        except (InputError, TraceError) as error:
            chains.traces.log.append(f"the loss is not cut into parts: {error}")
            break
        new, old = found.estimate, best[1].estimate
        if new is not None and (old is None or _gains(new, old, request)):
            best = cut, found
        elif old is not None:
            break
    return best


def with_fewer_logits(chains: Chains, request: Request) -> list[Chains]:
    """Return chains with the loss in ever more parts, after the given ones.

    Only the given ones where the loss cannot be cut, or must stay as it is.
    """
    free = request.checkpointing == "auto" and chains.setting.loss_chunks == 1
    subject = chains.traces.subject
    if not free or not can_chunk_loss(subject.model, subject.loss):
        return [chains]
    return [chains, *(chains.with_loss_chunks(parts) for parts in LOSS_PARTS)]


def _in_parts(
    chains: Chains, request: Request, budget: Budget, found: Estimate | None
) -> Iterator[Chains]:
    """Yield chains with the loss in more parts while that may still gain something."""
    size = found.recipe.batch_size if found is not None else request.batch_size or 1
    before, *others = with_fewer_logits(chains, request)
    for cut in others:
        behind = before.at(size).blocks[-1].keep
        most = max(behind.forward_bytes, behind.saved_bytes + behind.backward_bytes)
        if most < LEAST_SHARE * budget.usable_bytes:
            return
        yield cut
        before = cut


def _gains(new: Estimate, old: Estimate, request: Request) -> bool:
    first, second = (rank(each, request.objective)[0] for each in (new, old))
    return first < second - LEAST_GAIN * abs(second)
