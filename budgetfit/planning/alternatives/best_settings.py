"""The best settings of a model on a GPU: what a plan and a row of a comparison say."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from budgetfit.core.plan import Alternative, Estimate
from budgetfit.planning.alternatives.alternatives import (
    deciding_baselines,
    rows_by_engine,
)
from budgetfit.planning.alternatives.refusal import Refusal
from budgetfit.planning.search.engines import (
    engine_can_win,
    engine_of,
    likely_fastest_first,
)
from budgetfit.planning.search.holding_more import holding_more_can_gain
from budgetfit.planning.search.last_batch import (
    warnings_after_last_batch,
    with_last_batch_notes,
    with_room_for_last_batch,
)
from budgetfit.planning.search.loss_chunking import (
    better_without_host,
    faster_than_lowest,
    search_with_loss_chunks,
)
from budgetfit.planning.search.lowest_peak import lowest_judged
from budgetfit.planning.search.search import SearchResult
from budgetfit.planning.search.varying_lengths import (
    JudgedLengths,
    judge_all_lengths,
    session_for_lengths,
)
from budgetfit.planning.session import PlanningSession


class BestSettings(NamedTuple):
    """The best settings that the judge accepts.

    Attributes:
        session: That of their precision, and of their way to use several GPUs.
        judged: They, over all lengths of the samples.
        rows: What decided: usual practices, and other ways to use several GPUs.
        warnings: About the smaller last batch of an epoch.
        explanation: How they were found.
        rounds: Of the search.
        slower: Sessions of engines that cannot be faster.
    """

    session: PlanningSession
    judged: JudgedLengths
    rows: tuple[Alternative, ...]
    warnings: tuple[str, ...]
    explanation: str
    rounds: tuple[str, ...]
    slower: tuple[PlanningSession, ...]


def best_settings(sessions: Sequence[PlanningSession]) -> BestSettings | Refusal:
    """Return the best settings over all precisions, or why nothing fits."""
    found = best_found(sessions)
    if isinstance(found, Refusal):
        return found
    session = found.session
    session.traces.tracer.progress("judging the usual practices")
    baselines = deciding_baselines(session, found.judged)
    best, explanation = _best_judged(found, baselines)
    best, warnings = with_room_for_last_batch(
        session, best, [row.estimate for row in baselines]
    )
    baselines = with_last_batch_notes(session, best, baselines)
    judged = judge_all_lengths(session, best)
    own = session_for_lengths(session, judged.lengths)
    size = judged.estimate.recipe.batch_size
    if own is not session or size != best.recipe.batch_size:
        # The last batch meets the same allocator.
        warnings = warnings_after_last_batch(own, judged.estimate)
    return BestSettings(
        session,
        judged,
        (*baselines, *rows_by_engine(found.others)),
        warnings,
        explanation,
        found.rounds,
        found.slower,
    )


def best_found(sessions: Sequence[PlanningSession]) -> SearchResult | Refusal:
    """Return the best search result over all precisions, or why nothing fits.

    Weights and optimizer are kept in host memory only where nothing else fits.
    """
    on_gpus = [each for each in sessions if not each.offloads]
    offloaded = [each for each in sessions if each.offloads]
    held = [each for each in offloaded if each.host_may_hold]
    refused: Refusal | None = None
    for some in filter(None, (on_gpus, held)):
        found = _best_found(some)
        if isinstance(found, SearchResult):
            return found
        refused = found if refused is None else refused.and_offloaded(found)
    assert refused is not None  # noqa: S101 - others than what is offloaded are there
    return refused if held else refused._replace(offloaded=next(iter(offloaded), None))


def _best_found(sessions: Sequence[PlanningSession]) -> SearchResult | Refusal:
    """Return the same of settings that are compared with each other."""
    hopeful: list[PlanningSession] = []
    found: list[SearchResult] = []
    slower: dict[str, PlanningSession] = {}
    for session in likely_fastest_first(sessions):
        engine = engine_of(session)
        may_be_better = all(holding_more_can_gain(session, each) for each in found)
        if not may_be_better or not session.may_fit:
            continue
        rivals = [each.estimate for each in found if engine_of(each.session) != engine]
        if not all(engine_can_win(session, rival) for rival in rivals if rival):
            slower.setdefault(engine, session)
            continue
        hopeful.append(session)
        found.append(search_with_loss_chunks(session))
    rated = [
        (row.session.rank(row.estimate), number)
        for number, row in enumerate(found)
        if row.estimate is not None
    ]
    if rated:
        best = found[min(rated)[1]]
        if best.session.settings.parallelism is not None:
            others = tuple(each for each in found if each is not best)
            return replace(
                better_without_host(best),
                others=others,
                slower=tuple(slower.values()),
            )
        return better_without_host(best)
    # The search leaves room for what the allocator might reserve; only the judge can
    # say that nothing fits.
    tried = [(each, lowest_judged(each)) for each in hopeful or sessions]
    session, least = min(
        tried, key=lambda row: (not row[1].fits, row[1].reserved_bytes)
    )
    if least.fits:
        return better_without_host(faster_than_lowest(session, least))
    floor_bytes = min(row.timeline.floor_bytes for _, row in tried)
    return Refusal(session, least, floor_bytes)


def _best_judged(
    proposed: SearchResult, baselines: Sequence[Alternative]
) -> tuple[Estimate, str]:
    """Return the better of the search result and the baselines, as judged."""
    # The solver's formula ignores what the allocator reserves and compares only some
    # batch sizes, so that a baseline may beat its proposal; no plan may be worse than a
    # baseline.
    session, estimate = proposed.session, proposed.judged
    fitting = [row for row in baselines if row.fits]
    best = min(fitting, key=lambda row: session.rank(row.estimate), default=None)
    if (
        session.request.checkpointing != "auto"
        or best is None
        or session.rank(best.estimate) >= session.rank(estimate)
    ):
        return estimate, proposed.explanation
    explanation = (
        f"{best.label!r} came out ahead of the solver's own proposal once both were "
        f"judged; that one was: {proposed.explanation}"
    )
    return best.estimate, explanation
