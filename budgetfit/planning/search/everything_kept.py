"""Keep everything where nothing can be faster, without tracing other options.

A plan that frees bytes recomputes them, or moves them to the host. So the step of a
batch too large to keep everything takes at least as long as with everything kept, and
as the missing bytes take where they are freed fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from budgetfit.applying.loss.chunked_loss import can_chunk_loss
from budgetfit.core.block_profile import ChainProfile
from budgetfit.memory.chain.peak import chain_peak_bytes
from budgetfit.memory.replay import UNLIMITED_BYTES
from budgetfit.planning.search.baselines import best_with_segments
from budgetfit.planning.search.search import SearchResult, best_batch
from budgetfit.planning.search.solver_choice import (
    MIN_HOST_GAIN,
    SHOWN_AS_OPTIMAL,
    solver_ns,
)
from budgetfit.planning.session import PlanningSession
from budgetfit.solvers.problem import Problem, Solution
from budgetfit.timing.kernel_times import host_bytes_per_ns

if TYPE_CHECKING:
    ChainChange = Callable[[ChainProfile], ChainProfile]
    Rate = Callable[[ChainProfile], float]  # nanoseconds to free a byte

# A saved tensor may be half of a storage, which is freed as a whole.
COPIED_SHARE: Final = 0.5


def everything_kept(
    session: PlanningSession, chunked: ChainChange, chunks_gain: float
) -> SearchResult | None:
    """Return the plan that keeps everything, if none is faster at any batch size.

    Args:
        session: Of any request: only the fastest plan can be found so.
        chunked: Makes a profile as good as chunks of the loss can.
        chunks_gain: The share of the time that these have to gain.

    Returns:
        None where another plan may be faster.
    """
    request = session.request
    if (request.checkpointing, request.objective) != ("auto", "throughput"):
        return None
    plain = replace(session, block_chain=session.block_chain.without_options)
    size = session.smallest_searched
    if len(plain.block_chain.all_kept(size).batch_sizes) == 1:
        return None  # not affine: each batch size is traced
    smallest = plain.block_chain.profile_at(size, exact_blocks=False)
    if chain_peak_bytes(smallest, ()) > session.budget.usable_bytes:
        return None
    ns_per_byte = plain.block_chain.least_ns_per_freed_byte()
    bus_bytes_per_ns = host_bytes_per_ns(session.workload.gpu)

    def recomputing(_: ChainProfile) -> float:
        return ns_per_byte

    def with_host(chain: ChainProfile) -> float:
        return min(ns_per_byte, least_ns_per_offloaded_byte(chain, bus_bytes_per_ns))

    may_be_faster: list[tuple[Rate, ChainChange, float]] = [
        (recomputing, _unchanged, SHOWN_AS_OPTIMAL),
        (with_host, _unchanged, MIN_HOST_GAIN),
    ]
    if session.settings.loss_chunks == 1 and can_chunk_loss(
        session.workload.model, session.workload.loss
    ):
        may_be_faster.append((recomputing, chunked, chunks_gain))
    kept_ns, bounds_ns = _kept_ns(plain), []
    for rate, change, gain in may_be_faster:
        bounds_ns.append(_shortest_ns(plain, rate, change) / (1 - gain))
        # The judge finds no larger batch to fit than the formula does.
        if bounds_ns[-1] < kept_ns:
            return None
    estimate = best_with_segments(session, ())
    if (
        estimate is None
        or plain.block_chain.waiting_phases(estimate.recipe.batch_size)
        or min(bounds_ns) < solver_ns(estimate)
    ):
        return None
    count = len(session.workload.blocks)
    return SearchResult(
        session=session,
        estimate=estimate,
        explanation=f"All {count} blocks are kept; nothing is faster at any batch size",
    )


def least_ns_per_offloaded_byte(chain: ChainProfile, bytes_per_ns: float) -> float:
    """Return a lower bound on the time that offloading a byte of activations takes.

    ``bytes_per_ns``: of copies to the host and back, which overlap with the forward and
    the backward of their block.
    """
    # With recomputation a block's input alone is copied, and overlaps with nothing.
    copy_ns = COPIED_SHARE / bytes_per_ns
    return min(
        (
            sum(
                max(0.0, copy_ns - kernels_ns / block.keep.saved_bytes)
                for kernels_ns in (block.forward_ns, block.backward_ns)
            )
            for block in chain.blocks
            if len(block.options) > 1 and block.keep.saved_bytes
        ),
        default=0.0,
    )


def _unchanged(chain: ChainProfile) -> ChainProfile:
    return chain


def _kept_ns(session: PlanningSession) -> float:
    """Return the least time per sample with everything kept, by the formula."""
    profile_at = partial(session.block_chain.profile_at, exact_blocks=False)
    found = best_batch(session, profile_at, _keep_all).best
    return 0.0 if found is None else float(found.ns_per_sample or 0)


def _shortest_ns(session: PlanningSession, rate: Rate, change: ChainChange) -> float:
    """Return a lower bound on the time per sample over all batch sizes."""
    # Gradients that do not outlive a step are less than those that do: the profile with
    # these serves both, and another program is not traced.
    chain = session.block_chain

    def profile_at(batch_size: int) -> ChainProfile:
        whole = chain.is_whole(batch_size)
        same = chain.accumulating if whole else chain
        profile = same.profile_at(batch_size, exact_blocks=False)
        kept = change(profile)
        missing = chain_peak_bytes(kept, ()) - session.budget.usable_bytes
        missing -= chain.gradient_bytes if whole else 0
        return _with_freed_bytes(kept, max(0, missing), rate(profile))

    found = best_batch(session, profile_at, _keep_all, UNLIMITED_BYTES).best
    return math.inf if found is None else float(found.ns_per_sample or 0)


def _with_freed_bytes(
    chain: ChainProfile, missing: int, ns_per_byte: float
) -> ChainProfile:
    """Return the chain with the time of freeing bytes, or too large where it cannot."""
    freed = sum(
        block.keep.saved_bytes + block.keep.cached_bytes
        for block in chain.blocks
        if len(block.options) > 1
    )
    if missing > freed:
        return replace(chain, static_bytes=chain.static_bytes + UNLIMITED_BYTES)
    last = chain.blocks[-1]
    # Where no block can be recomputed, freeing a byte takes infinitely long.
    extra_ns = round(missing * ns_per_byte) if missing else 0
    longer = replace(last, forward_ns=last.forward_ns + extra_ns)
    return replace(chain, blocks=(*chain.blocks[:-1], longer))


def _keep_all(problem: Problem) -> Solution:
    fits = chain_peak_bytes(problem.chain, ()) <= problem.limit_bytes
    return Solution(
        segments=() if fits else None, proven_optimal=True, explanation="kept"
    )
