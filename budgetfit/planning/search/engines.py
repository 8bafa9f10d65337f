"""DDP, FSDP2 and DeepSpeed side by side: which is searched first, and which cannot win.

A step of an engine takes at least what it takes with nothing recomputed, at the largest
batch size that fits if blocks held no activations, nor a chunked loss any logits.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from budgetfit.core.block_profile import BlockProfile, ChainProfile
from budgetfit.core.plan import Estimate
from budgetfit.planning.search.loss_chunking import chunked_best, with_more_loss_chunks
from budgetfit.planning.search.search import can_gain, fastest_by_formula
from budgetfit.planning.session import PlanningSession


def engine_of(session: PlanningSession) -> str:
    """Return a session's engine; empty on one GPU."""
    parallelism = session.settings.parallelism
    return "" if parallelism is None else parallelism.engine


def likely_fastest_first(
    sessions: Sequence[PlanningSession],
) -> list[PlanningSession]:
    """Return the sessions by engine, first that of the fastest by formula.

    Blocks are kept or recomputed there: no trace is made that the search would not.
    """
    first = {engine_of(each): each for each in reversed(sessions)}
    if len(first) == 1 or sessions[0].request.objective != "throughput":
        return [*sessions]
    sample_ns: dict[str, float] = {}
    for engine, session in first.items():
        best = fastest_by_formula(_with_plain_blocks(session)).best
        sample_ns[engine] = float(best.ns_per_sample or 0) if best else math.inf
    return sorted(sessions, key=lambda each: sample_ns[engine_of(each)])


def engine_can_win(session: PlanningSession, known: Estimate) -> bool:
    """Whether the engine of a session may be faster than ``known``, of another one."""
    plain = _with_plain_blocks(session)
    if can_gain(plain, known, 0.0, _without_activations):
        return True
    return len(with_more_loss_chunks(plain)) > 1 and can_gain(
        plain, known, 0.0, lambda chain: chunked_best(_without_activations(chain))
    )


def _with_plain_blocks(session: PlanningSession) -> PlanningSession:
    return replace(session, block_chain=session.block_chain.without_options)


def _without_activations(chain: ChainProfile) -> ChainProfile:
    """Return the chain whose blocks, where they can be recomputed, hold no bytes."""

    def emptied(block: BlockProfile) -> BlockProfile:
        if len(block.options) == 1:
            return block
        free = replace(
            block.keep,
            saved_bytes=0,
            forward_bytes=0,
            backward_bytes=0,
            cached_bytes=0,
        )
        return replace(block, options=(free,))

    return replace(chain, blocks=tuple(map(emptied, chain.blocks)))
