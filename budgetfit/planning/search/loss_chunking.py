"""Chunked cross-entropy: whether to compute output head and loss in chunks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Final

from budgetfit.applying.loss.chunked_loss import can_chunk_loss
from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.plan import Estimate
from budgetfit.errors import InputError, TraceError
from budgetfit.planning.search.baselines import best_with_policy, best_with_segments
from budgetfit.planning.search.everything_kept import everything_kept
from budgetfit.planning.search.search import (
    MAX_ROUNDS,
    SearchResult,
    can_gain,
    fastest_by_formula,
    search,
    search_within_limits,
    with_near_misses,
)
from budgetfit.planning.search.solver_choice import (
    MIN_HOST_GAIN,
    solver_ns,
    without_host_options,
)
from budgetfit.planning.session import PlanningSession
from budgetfit.solvers.batch_size import BatchCandidate

# More chunks hold less and launch smaller kernels; the first that leave little to gain
# are taken.
LOSS_CHUNKS: Final = (8, 16, 32, 64, 256)
# For the lowest peak, and to tell whether any number fits: 64 hold less than fewer do.
LOWEST_CHUNKS: Final = (8, 64, 256)
# Where the peak of head and loss is a smaller share than this of what the budget leaves
# to activations, chunks gain next to nothing and are not tried.
MIN_BUDGET_SHARE: Final = 0.05
# Of the forward time behind the last block, the head and the loss are at least so much.
HEAD_SHARE: Final = 0.8
# A chunked loss replaces the model's own: it has to gain this much.
MIN_GAIN: Final = 0.01


def search_with_loss_chunks(
    session: PlanningSession, max_rounds: int = MAX_ROUNDS
) -> SearchResult:
    """Search with the plain loss, and with a chunked one where that is better."""
    # Chunks run the head again in the backward pass and never hold all logits. They are
    # tried with ``checkpointing="auto"`` only.
    kept = everything_kept(session, chunked_best, MIN_GAIN)
    if kept is not None:
        return kept
    solved = fastest_by_formula(session)
    apart = session.block_chain.streams_apart is not session.block_chain
    ahead = _search_ahead(session, solved.best, max_rounds)
    if ahead is not None and solved.best and _beats_fewer_chunks(ahead, session):
        # More chunks are tried where a search with the plain loss would try them.
        size = solved.best.batch_size if apart else None
        return _with_more_chunks(session, ahead, max_rounds, size=size)
    best = search_within_limits(
        session,
        max_rounds,
        None if apart else solved,  # a search begins with live bytes alone
        partial(best_with_segments, session, ()),
    )
    if best.estimate and not can_gain(session, best.estimate, MIN_GAIN, chunked_best):
        return with_near_misses(best, max_rounds)
    return _with_more_chunks(session, best, max_rounds, ahead)


def _with_more_chunks(
    session: PlanningSession,
    best: SearchResult,
    max_rounds: int,
    ahead: SearchResult | None = None,
    size: int | None = None,
) -> SearchResult:
    """Return the best with as many chunks as ``best`` has or more.

    Args:
        session: With the plain loss.
        best: Without near misses if its loss is plain.
        max_rounds: Of each search.
        ahead: The result with some number of chunks, searched already.
        size: The batch size at which more have to be worth it; that of ``best``.
    """
    unchunked = best if _chunks(best.session) == 1 else None
    known = best.estimate
    size = size or (known.recipe.batch_size if known else session.smallest_searched)
    searched = {} if ahead is None else {_chunks(ahead.session): ahead}

    def found_with(chunked: PlanningSession) -> SearchResult:
        chunks = _chunks(chunked)
        if chunks not in searched:
            searched[chunks] = search(chunked, max_rounds=max_rounds)
        return searched[chunks]

    try:
        counts = LOSS_CHUNKS if known else _counts_that_fit(session, size, found_with)
        for chunked in _worth_trying(session, size, counts):
            if _chunks(chunked) <= _chunks(best.session):
                continue
            if best.estimate and not (
                _more_chunks_can_gain(best, chunked)
                and can_gain(chunked, best.estimate, MIN_GAIN)
            ):
                break
            found = found_with(chunked)
            if unchunked is not None:
                wins = found.estimate  # over what takes no less than this per sample
                below_ns = solver_ns(wins) / (1 - MIN_GAIN) if wins else None
                best = with_near_misses(unchunked, max_rounds, below_ns)
                unchunked = None
            if found.estimate is not None and (
                best.estimate is None or _gains(session, found.estimate, best.estimate)
            ):
                best = found
            elif best.estimate is not None:
                break
    except (InputError, TraceError) as error:
        session.traces.log.append(f"the loss is not cut into parts: {error}")
    return best if unchunked is None else with_near_misses(unchunked, max_rounds)


def _more_chunks_can_gain(found: SearchResult, chunked: PlanningSession) -> bool:
    """Whether a session of more chunks may be worth it, by the traces of fewer."""
    # The head's bytes are at least their share by the number of chunks; what no chunk
    # divides stays. With the plain loss, which takes less time, it is known already.
    fewer, more = _chunks(found.session), _chunks(chunked)
    return fewer == 1 or can_gain(
        found.session, found.judged, MIN_GAIN, partial(_with_head_bytes, fewer / more)
    )


def _counts_that_fit(
    session: PlanningSession,
    batch_size: int,
    found_with: Callable[[PlanningSession], SearchResult],
) -> Sequence[int]:
    """Return the numbers of chunks with which a plan may fit, none if none does."""
    # Each number takes traces of its own, so a refusal should need few of them.
    too_few = 1
    for chunked in _worth_trying(session, batch_size, LOWEST_CHUNKS):
        if found_with(chunked).estimate is not None:
            return [count for count in LOSS_CHUNKS if count > too_few]
        too_few = _chunks(chunked)
    return ()


def faster_than_lowest(session: PlanningSession, lowest: Estimate) -> SearchResult:
    """Return the best with the loss in as many chunks as the recipe of lowest peak.

    More than were searched: these leave little to gain, and yet nothing fitted.

    Args:
        session: With the plain loss.
        lowest: The recipe with the lowest peak, which fits.
    """
    found = SearchResult(
        session=session, estimate=lowest, explanation="The lowest that was found"
    )
    for each in with_more_loss_chunks(session):
        if _chunks(each) == lowest.recipe.loss_chunks:
            at_its_size = each.asking(batch_size=lowest.recipe.batch_size)
            other = search(at_its_size)
            if other.estimate and session.rank(other.estimate) < session.rank(lowest):
                found = replace(other, session=each)
    return found


def _search_ahead(
    session: PlanningSession, best: BatchCandidate | None, max_rounds: int
) -> SearchResult | None:
    """Search with as many chunks as make the solver's plan the fastest.

    None where that is one. With fewer chunks plans are then often not searched at all.
    No trace is made here that the search itself would not make. ``best`` is the
    solver's plan with the plain loss.
    """
    chain, expected = session.block_chain, session
    if (
        best is None
        or session.request.objective != "throughput"
        or len(chain.all_kept(best.batch_size).batch_sizes) == 1
        or chain.waiting_phases(best.batch_size)  # plans may be faster than solved
    ):
        return None
    try:
        for chunked in _worth_trying(session, best.batch_size):
            below_ns = (1 - Fraction(MIN_GAIN)) * (best.ns_per_sample or 0)
            if not _faster(expected, below_ns, chunked_best, any_below=True):
                break
            found = _faster(chunked, below_ns)
            if found is None:
                break
            best, expected = found, chunked
        if expected is not session:
            return search(expected, max_rounds=max_rounds)
    except (InputError, TraceError):  # said once more where the loss is cut
        pass
    return None


def _faster(
    session: PlanningSession,
    below_ns: Fraction,
    chain_of: Callable[[ChainProfile], ChainProfile] | None = None,
    **further: Any,
) -> BatchCandidate | None:
    """Return the solver's plan in all usable bytes if it takes less per sample."""
    best = fastest_by_formula(session, chain_of, below_ns, **further).best
    return best if best and (best.ns_per_sample or 0) < below_ns else None


def _beats_fewer_chunks(found: SearchResult, session: PlanningSession) -> bool:
    """Whether no plan with fewer chunks can keep ``found`` from being taken."""
    if found.estimate is None:
        return False
    loss = 1 - 1 / (1 - MIN_GAIN)
    return not any(
        can_gain(fewer, found.estimate, loss)
        for fewer in with_more_loss_chunks(session)
        if _chunks(fewer) < _chunks(found.session)
    )


def _chunks(session: PlanningSession) -> int:
    return session.settings.loss_chunks


def search_without_host(
    session: PlanningSession, max_rounds: int = MAX_ROUNDS
) -> SearchResult:
    """Search without offload to host memory."""
    plain = session.changed(loss_chunks=1, host_ram_bytes=0)
    return search_with_loss_chunks(plain, max_rounds)


def better_without_host(
    found: SearchResult, max_rounds: int = MAX_ROUNDS
) -> SearchResult:
    """Return the best without offload, where ``found`` offloads and is no better."""
    # By live bytes offload is better, but the two may reserve otherwise than these say.
    # What it gains in time has to be worth it, as in ``fastest_plan``.
    session, estimate = found.session, found.estimate
    if estimate is None or not estimate.recipe.offloads_activations:
        return found
    gain = MIN_HOST_GAIN if session.request.objective == "throughput" else 0.0
    if not _may_be_as_fast(session, estimate, gain):
        return found
    plain = search_without_host(session, max_rounds)
    if plain.estimate is None:
        return found
    value, *ties = session.rank(estimate)
    if session.rank(plain.estimate) >= ((1 + gain) * value, *ties):
        return found
    if plain.session.settings.loss_chunks != session.settings.loss_chunks:
        return plain
    return replace(plain, session=session)  # what is compared later may offload


def best_for_objective(
    session: PlanningSession, judged: Sequence[Estimate] = ()
) -> Estimate | None:
    """Return the best recipe found for the session's objective; None if none fits.

    Searched as for a plan with that objective, but for ``better_without_host``, which
    takes as long again and is worth 1 % at most. ``judged`` may be better.
    """
    tried = list(judged)
    if session.request.checkpointing == "auto" and session.workload.blocks:
        tried.append(best_with_policy(session, "full"))
    if _chunks(session) > 1:
        session = session.changed(loss_chunks=1)
    found = search_with_loss_chunks(session).estimate
    return session.best_fitting([*tried, *([found] if found is not None else [])])


def _may_be_as_fast(session: PlanningSession, known: Estimate, loss: float) -> bool:
    """Whether a plan without offload may be no slower than ``known`` by a share."""
    if can_gain(session, known, -loss, without_host_options):
        return True
    if not can_gain(session, known, -loss, _chunked_without_host):
        return False
    whole = session.changed(loss_chunks=1, host_ram_bytes=0)
    try:
        return any(
            can_gain(each, known, -loss)
            for each in _worth_trying(whole, known.recipe.batch_size)
        )
    except (InputError, TraceError):  # the loss is not cut into parts
        return False


def with_more_loss_chunks(
    session: PlanningSession, counts: Sequence[int] = LOSS_CHUNKS
) -> list[PlanningSession]:
    """Return the given session and ones with ever more loss chunks, in these counts.

    Only the given one where the loss cannot be chunked, or must not be.
    """
    settings, workload = session.settings, session.workload
    several = settings.parallelism
    free = session.request.checkpointing == "auto" and settings.loss_chunks == 1
    if (
        not free
        or (several is not None and several.engine == "deepspeed")
        or not can_chunk_loss(workload.model, workload.loss)
    ):
        return [session]
    chains = (session.block_chain.with_loss_chunks(chunks) for chunks in counts)
    return [session, *(replace(session, block_chain=chain) for chain in chains)]


def _worth_trying(
    session: PlanningSession, batch_size: int, counts: Sequence[int] = LOSS_CHUNKS
) -> Iterator[PlanningSession]:
    """Yield sessions with more loss chunks while these may still gain something."""
    whole, *others = with_more_loss_chunks(session, counts)
    if not others:
        return
    all_bytes = left_bytes = _bytes_behind_blocks(whole, batch_size)
    profile = whole.block_chain.profile_at(batch_size, exact_blocks=False)
    least_bytes = MIN_BUDGET_SHARE * (
        session.budget.usable_bytes - profile.static_bytes
    )
    for chunked in others:
        if left_bytes < least_bytes:
            return
        yield chunked
        # What no chunk divides, such as a cast of the head's weight, stays.
        freed_bytes = all_bytes - _bytes_behind_blocks(chunked, batch_size)
        left_bytes = freed_bytes / (chunked.settings.loss_chunks - 1)


def _bytes_behind_blocks(session: PlanningSession, batch_size: int) -> float:
    """Return the most that head and loss take at a batch size."""
    profile = session.block_chain.profile_at(batch_size, exact_blocks=False)
    keep = profile.blocks[-1].keep
    return max(keep.forward_bytes, keep.saved_bytes + keep.backward_bytes)


def chunked_best(chain: ChainProfile) -> ChainProfile:
    """Return the chain with the best that chunks can do: no bytes of head and loss."""
    # They are run forward once more, but for the norm before them.
    *blocks, head = _with_head_bytes(0, chain).blocks
    forward_ns = round(head.forward_ns * HEAD_SHARE)
    head = replace(head, backward_ns=head.backward_ns + forward_ns)
    return replace(chain, blocks=(*blocks, head))


def _with_head_bytes(share: float, chain: ChainProfile) -> ChainProfile:
    """Return the chain with a share of the bytes of head and loss."""
    *blocks, head = chain.blocks
    keep = replace(
        head.keep,
        saved_bytes=int(share * head.keep.saved_bytes),
        forward_bytes=int(share * head.keep.forward_bytes),
        backward_bytes=int(share * head.keep.backward_bytes),
    )
    return replace(chain, blocks=(*blocks, replace(head, options=(keep,))))


def _chunked_without_host(chain: ChainProfile) -> ChainProfile:
    return chunked_best(without_host_options(chain))


def _gains(session: PlanningSession, new: Estimate, old: Estimate) -> bool:
    first, second = (session.rank(each)[0] for each in (new, old))
    return first < second - MIN_GAIN * abs(second)
