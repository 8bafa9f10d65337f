"""Chunked cross-entropy: whether to compute output head and loss in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from budgetfit.applying.loss.chunked_loss import can_chunk_loss
from budgetfit.errors import InputError, TraceError
from budgetfit.planning.search.search import (
    MAX_ROUNDS,
    Request,
    SearchResult,
    rank,
    search,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.planning.profiling.block_chain import BlockChain

# More chunks hold less and launch smaller kernels; the first that leave little to gain
# are taken.
LOSS_CHUNKS: Final = (8, 64, 256)
# Where the peak of head and loss is a smaller share of the budget than this, chunks
# gain next to nothing and are not tried.
MIN_BUDGET_SHARE: Final = 0.05
# A chunked loss replaces the model's own: it has to gain this much.
MIN_GAIN: Final = 0.01


def search_with_loss_chunks(
    block_chain: BlockChain,
    request: Request,
    budget: Budget,
    max_rounds: int = MAX_ROUNDS,
) -> tuple[BlockChain, SearchResult]:
    """Search with the plain loss, and with a chunked one where that is better.

    Chunks run the head again in the backward pass and never hold all logits. They are
    tried with ``checkpointing="auto"`` only.
    """
    best = block_chain, search(block_chain, request, budget, max_rounds=max_rounds)
    for cut in _in_parts(block_chain, request, budget, best[1].estimate):
        try:
            found = search(cut, request, budget, max_rounds=max_rounds)
        except (InputError, TraceError) as error:
            block_chain.traces.log.append(f"the loss is not cut into parts: {error}")
            break
        new, old = found.estimate, best[1].estimate
        if new is not None and (old is None or _gains(new, old, request)):
            best = cut, found
        elif old is not None:
            break
    return best


def with_more_loss_chunks(
    block_chain: BlockChain, request: Request
) -> list[BlockChain]:
    """Return the given chain and ones with ever more loss chunks.

    Only the given one where the loss cannot be chunked, or must not be.
    """
    free = request.checkpointing == "auto" and block_chain.settings.loss_chunks == 1
    workload = block_chain.traces.workload
    if not free or not can_chunk_loss(workload.model, workload.loss):
        return [block_chain]
    return [
        block_chain,
        *(block_chain.with_loss_chunks(parts) for parts in LOSS_CHUNKS),
    ]


def _in_parts(
    block_chain: BlockChain, request: Request, budget: Budget, found: Estimate | None
) -> Iterator[BlockChain]:
    """Yield chains with more loss chunks while these may still gain something."""
    size = found.recipe.batch_size if found is not None else request.batch_size or 1
    before, *others = with_more_loss_chunks(block_chain, request)
    for cut in others:
        behind = before.profile_at(size).blocks[-1].keep
        most = max(behind.forward_bytes, behind.saved_bytes + behind.backward_bytes)
        if most < MIN_BUDGET_SHARE * budget.usable_bytes:
            return
        yield cut
        before = cut


def _gains(new: Estimate, old: Estimate, request: Request) -> bool:
    first, second = (rank(each, request.objective)[0] for each in (new, old))
    return first < second - MIN_GAIN * abs(second)
