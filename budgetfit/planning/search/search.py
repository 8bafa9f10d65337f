"""The search loop: profile, solve, trace the recipe as applied, replay it, repeat.

The solver bounds live bytes by a formula; the replay decides whether a recipe fits
(docs/decisions/0002-solvers-propose-one-judge-decides.md). Where it needs too much, the
solver's limit shrinks by the excess for the next round.

Some plans above that limit fit all the same: it leaves room for what the allocator
reserves beyond live bytes, by one estimate for all plans. Those that are faster than
the best one found, and whose live bytes fit, are judged: as many as are cheap to trace.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Any, Final

from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Recipe
from budgetfit.errors import TraceError
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.planning.profiling.block_chain import BlockChain
from budgetfit.planning.search.policies import solver_for
from budgetfit.planning.search.solver_choice import (
    MAX_SEGMENT,
    fastest_plan,
    fastest_plan_bounds,
    lowest_peak_nested,
    solver_ns,
    without_host_options,
)
from budgetfit.planning.session import PlanningSession
from budgetfit.solvers.batch_size import BatchCandidate, BatchChoice, choose_batch_size
from budgetfit.solvers.chain_dp import pareto_front
from budgetfit.solvers.host_limit import host_holds
from budgetfit.solvers.problem import Problem, Solution
from budgetfit.solvers.regular_order import in_regular_order

MAX_ROUNDS: Final = 8
# The excess shrinks the next limit, by at least this much: rounding costs no round.
STEP_BYTES: Final = 8 << 20
SMALL_SLACK: Final = 0.02  # of the usable bytes: unused bytes not worth another round
# More unused bytes than this are worth a round between the largest limit that fit and
# the smallest that did not.
LARGE_SLACK: Final = 0.03
MIN_ROUND_GAIN: Final = 0.05  # of the step's time that a larger limit would save
MIN_SIZE_GAIN: Final = 0.02  # of the time that another size beside a refused one saves
# Each candidate above the limit costs a trace. So many traced ops take a few seconds:
# models of a few blocks get a dozen candidates and deep ones one or two.
MAX_TRACED_OPS: Final = 20_000
# Pareto fronts are long where blocks all differ; beyond this they are thinned.
MAX_FRONT_LABELS: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best recipe that the judge accepts, or None, and the rounds of the search.

    ``session`` is the one that found it: its loss may be chunked. ``others`` are those
    of other parallelisms, and ``slower`` the sessions of engines that cannot be faster.
    """

    session: PlanningSession
    estimate: Estimate | None
    explanation: str = ""
    rounds: tuple[str, ...] = ()
    others: tuple[SearchResult, ...] = ()
    slower: tuple[PlanningSession, ...] = ()

    @property
    def judged(self) -> Estimate:
        """The estimate, where there is one."""
        assert self.estimate is not None  # noqa: S101 - asked for only then
        return self.estimate


def search(session: PlanningSession, *, max_rounds: int = MAX_ROUNDS) -> SearchResult:
    """Return the best recipe under the request that the judge accepts.

    First within limits for the solver, then among candidates above such a limit. At
    most ``max_rounds`` recipes are judged for the first, and where that is fewer than
    usual, for both. ``estimate`` is None when nothing fits, not even batch 1.
    """
    return with_near_misses(search_within_limits(session, max_rounds), max_rounds)


def with_near_misses(
    found: SearchResult, max_rounds: int, below_ns: float | None = None
) -> SearchResult:
    """Return the best of a search within limits and of candidates above its limit.

    Args:
        found: Of ``search_within_limits``.
        max_rounds: As it was there.
        below_ns: Only what may take less per sample is judged.
    """
    session, best = found.session, found.estimate
    request = session.request
    wanted = request.checkpointing == "auto" and request.objective == "throughput"
    if best is None or not wanted or not best.recipe.segments:
        return found  # nothing is faster than everything kept
    explanation, rounds = found.explanation, list(found.rounds)
    left = max_rounds - len(rounds) if max_rounds < MAX_ROUNDS else None
    for recipe, how in _over_limit_candidates(session, best.recipe, left, below_ns):
        estimate = session.judge(recipe)
        rounds.append(_verdict(estimate))
        if estimate.fits and session.rank(estimate) < session.rank(best):
            best, explanation = estimate, how
    return replace(found, estimate=best, explanation=explanation, rounds=tuple(rounds))


def can_gain(
    session: PlanningSession,
    known: Estimate,
    gain: float,
    chain_of: Callable[[ChainProfile], ChainProfile] | None = None,
) -> bool:
    """Whether a search may find something faster than ``known`` by a share ``gain``.

    No search proposes anything faster than the solver's plan in all usable bytes, and
    the solver's times are those of the judge. True for objectives but throughput.
    ``chain_of`` changes each profile before it is solved.
    """
    if session.request.objective != "throughput":
        return True
    below_ns = Fraction(solver_ns(known) * (1 - gain))
    found = fastest_by_formula(session, chain_of, below_ns, any_below=True)
    if found.best is None:
        return not found.lower_ns  # else the plan of lowest peak may fit
    return (found.best.ns_per_sample or 0) < below_ns


def fastest_by_formula(
    session: PlanningSession,
    chain_of: Callable[[ChainProfile], ChainProfile] | None = None,
    below_ns: Fraction | None = None,
    **further: Any,
) -> BatchChoice:
    """Return the solver's plan in all usable bytes: no search finds a faster one.

    That is what the streams' pools leave of them. ``chain_of`` as in ``can_gain``,
    ``below_ns`` and ``further`` as in ``choose_batch_size``.
    """
    profile_at = session.block_chain.streams_apart.profiles_within(
        session.budget.usable_bytes, exact_blocks=False
    )
    solve = solver_for(session)
    return best_batch(
        session,
        (lambda size: chain_of(profile_at(size))) if chain_of else profile_at,
        solve,
        bounds=fastest_plan_bounds if solve is fastest_plan else None,
        below_ns=below_ns,
        **further,
    )


def search_within_limits(
    session: PlanningSession,
    max_rounds: int,
    solved: BatchChoice | None = None,
    kept: Callable[[], Estimate | None] | None = None,
) -> SearchResult:
    """Return the best proposal of the solver under a changing limit of live bytes.

    The limit starts where the traced programs suggest; it shrinks by the excess while
    recipes do not fit, and grows by the unused bytes once one fits, until these are two
    per cent or less. Where nothing is within the first limit, the plan of lowest peak
    shows how much the allocator reserves beyond the formula.

    Args:
        session: What is planned.
        max_rounds: Most recipes to judge.
        solved: What ``fastest_by_formula`` returns, where that is known.
        kept: Finds the best that keeps everything, as judged; taken in place of such a
            proposal at another batch size.
    """
    proposals = _Proposals(session, solved)
    limits = _Limits.of(session, proposals)
    rounds: list[str] = []
    seen: set[Recipe] = set()
    best, explanation = None, ""
    for _ in range(max_rounds):
        limit_bytes = limits.now
        chosen = proposals.within(limit_bytes)
        if chosen is None and best is None:
            chosen, limits.is_last = proposals.lowest(), True
        if chosen is None:
            break
        recipe = session.settings.recipe(
            chosen.batch_size, chosen.solution.segments or ()
        )
        if kept and not recipe.segments and (known := kept()):
            recipe = known.recipe
        if recipe in seen:
            break
        seen.add(recipe)
        try:
            estimate = session.judge(recipe)
        except TraceError as error:
            proposals.refuse(chosen.batch_size, error)
            continue
        rounds.append(
            f"solved within {limits.now} bytes: formula {chosen.peak_bytes}; "
            f"{_verdict(estimate)}"
        )
        if estimate.fits and (
            best is None or session.rank(estimate) < session.rank(best)
        ):
            best, explanation = estimate, chosen.solution.explanation
        if limits.moved(chosen, estimate, best):
            continue
        if best is None or not proposals.may_be_faster_beside(
            limit_bytes, chosen, best
        ):
            break
        limits.now = limit_bytes
    return SearchResult(
        session=session, estimate=best, explanation=explanation, rounds=tuple(rounds)
    )


class _Proposals:
    """The solver's plans at the best batch size, within any limit of live bytes."""

    def __init__(
        self, session: PlanningSession, solved: BatchChoice | None = None
    ) -> None:
        self._session = session
        self._solve = solver_for(session)
        self._roughly: dict[int, BatchChoice] = {}
        if solved is not None:
            self._roughly[session.budget.usable_bytes] = solved
        self._refused: set[int] = set()

    def within(self, limit_bytes: int) -> BatchCandidate | None:
        """Return the best batch size and its plan within a limit.

        Batch sizes are compared without ``exact_blocks``, which takes 20 times as long;
        the chosen one is then solved with it. Nothing is faster than everything kept:
        where that is chosen, it is tried without the traces of other programs.
        """
        while (rough := self.roughly(limit_bytes).best) is not None:
            try:
                exact = None
                if not rough.solution.segments:
                    kept = self._session.block_chain.only_kept
                    exact = self._exactly(kept, limit_bytes, rough.batch_size)
                if exact is None or exact.solution.segments:
                    chain = self._session.block_chain
                    exact = self._exactly(chain, limit_bytes, rough.batch_size)
            except TraceError as error:
                self.refuse(rough.batch_size, error)
            else:
                return exact or rough
        return None

    def _exactly(
        self, block_chain: BlockChain, limit_bytes: int, batch_size: int
    ) -> BatchCandidate | None:
        return best_batch(
            self._session,
            block_chain.profiles_within(limit_bytes),
            self._solve,
            limit_bytes,
            batch_sizes=[batch_size],
        ).best

    def refuse(self, batch_size: int, error: TraceError) -> None:
        """Propose no more plans at a batch size that the model does not take."""
        # Raises the error given, where there is no other size to try.
        session = self._session
        if (
            session.request.batch_size is not None
            or batch_size == session.smallest_batch
            or batch_size in self._refused
        ):
            raise error
        session.traces.log.append(f"batch {batch_size} is left out: {error}")
        self._refused.add(batch_size)
        self._roughly.clear()

    def may_be_faster_beside(
        self, limit_bytes: int, chosen: BatchCandidate, best: Estimate
    ) -> bool:
        """Leave out a batch size that was refused, if another may be faster than best.

        Of another size the allocator may reserve less within the same limit.
        """
        size, known = chosen.batch_size, best.recipe.batch_size
        if self._session.request.objective != "throughput" or size == known:
            return False
        most_ns = solver_ns(best) * (1 - MIN_SIZE_GAIN)
        if not any(
            each.ns_per_sample and each.ns_per_sample < most_ns
            for each in self.roughly(limit_bytes).considered
            if each.batch_size not in {size, known}
        ):
            return False
        self._refused.add(size)
        self._roughly.clear()
        return True

    def roughly(self, limit_bytes: int) -> BatchChoice:
        """Return the choice of a batch size on profiles without ``exact_blocks``."""
        if limit_bytes not in self._roughly:
            tried = sorted(self._roughly)
            larger = tried[bisect_left(tried, limit_bytes) :]
            self._roughly[limit_bytes] = best_batch(
                self._session,
                self._session.block_chain.profiles_within(
                    limit_bytes, exact_blocks=False
                ),
                self._solve,
                limit_bytes,
                bounds=fastest_plan_bounds if self._solve is fastest_plan else None,
                before=self._roughly[larger[0]] if larger else None,
                refused=self._refused,
            )
        return self._roughly[limit_bytes]

    def lowest(self) -> BatchCandidate | None:
        """Return the plan of lowest peak, at the requested batch size or the least."""
        session = self._session
        if session.request.checkpointing != "auto":
            return None
        return best_batch(
            session,
            session.block_chain.profile_at,
            lowest_peak_nested,
            batch_sizes=[session.smallest_batch],
        ).best


def best_batch(
    session: PlanningSession,
    profile_at: Callable[[int], ChainProfile],
    solve: Callable[[Problem], Solution],
    limit_bytes: int | None = None,
    **further: Any,
) -> BatchChoice:
    """Choose the batch size for a session, within its budget or another limit.

    ``further`` as of ``choose_batch_size``.
    """
    size = session.request.batch_size
    lowest = session.request.objective == "memory"
    return choose_batch_size(
        profile_at,
        solve,
        limit_bytes=session.budget.usable_bytes if limit_bytes is None else limit_bytes,
        objective=session.request.objective,
        effective_batch_size=session.settings.effective_batch_size,
        micro_batches=session.settings.accumulation or 1,
        smallest=session.smallest_batch if lowest else session.smallest_searched,
        largest=session.largest_searched,
        most=session.largest_taken,
        **{"batch_sizes": None if size is None else [size], **further},
    )


@dataclass(slots=True, kw_only=True)
class _Limits:
    """The solver's limit of live bytes, from round to round.

    Attributes:
        limit_bytes: Bytes that may be reserved.
        now: The limit of the round.
        refused: The smallest limit whose plan did not fit.
        agreed: The largest limit whose plan fits.
        is_last: Whether there is no smaller limit to try.
    """

    limit_bytes: int
    now: int
    refused: int
    agreed: int = 0
    is_last: bool = False

    @classmethod
    def of(cls, session: PlanningSession, proposals: _Proposals) -> _Limits:
        """Leave room for what the allocator is likely to reserve beyond live bytes."""
        # Estimated from the programs that are traced already; it only saves rounds.
        limit_bytes = session.budget.usable_bytes
        first = proposals.roughly(limit_bytes).best
        now = limit_bytes
        sizes = (first.batch_size, session.smallest_searched) if first else ()

        def keeps_all(reserve: int) -> bool:
            """Whether everything kept is proposed: no other program's gap matters."""
            if first is None or first.solution.segments:
                return False
            found = proposals.roughly(limit_bytes - reserve).best
            return found is not None and not found.solution.segments

        for size in dict.fromkeys(sizes):
            try:
                reserve = session.block_chain.reserve_bytes(size, enough=keeps_all)
            except TraceError:  # the model does not take it: the first round says so
                continue
            now = limit_bytes - reserve
            if proposals.roughly(now).best:  # else a smaller batch may reserve less
                break
        return cls(limit_bytes=limit_bytes, now=now, refused=limit_bytes + 1)

    def moved(
        self, chosen: BatchCandidate, judged: Estimate, best: Estimate | None
    ) -> bool:
        """Move the limit after a round; return whether another round is worth it."""
        slack = self.limit_bytes - judged.reserved_bytes
        peak_bytes = chosen.peak_bytes or self.now
        if judged.fits:
            self.is_last = False
            if slack <= self.limit_bytes * SMALL_SLACK or self.now >= self.limit_bytes:
                return False
            self.agreed = max(self.now, peak_bytes)
            self.now = min(self.agreed + slack, self.limit_bytes, self.refused - 1)
            return True
        if self.is_last or slack >= 0:  # host memory is the bottleneck
            return False
        self.refused = self.now
        if best is None:
            below = min(self.now, peak_bytes)
            self.now = min(below + slack, self.now - STEP_BYTES)
            return True
        unused = self.limit_bytes - best.reserved_bytes
        room = self.refused - self.agreed
        self.now = self.agreed + room // 2
        gain = 1 - float(chosen.ns_per_sample or 0) / solver_ns(best)
        much = unused > self.limit_bytes * LARGE_SLACK and room > 2 * STEP_BYTES
        return much and gain > MIN_ROUND_GAIN


def _verdict(estimate: Estimate) -> str:
    recipe = estimate.recipe
    verdict = "fits" if estimate.fits else "does not fit"
    return (
        f"batch {recipe.batch_size}, {len(recipe.wrapped_blocks)} blocks not simply "
        f"kept: replay allocated {estimate.allocated_bytes}, reserved "
        f"{estimate.reserved_bytes}: {verdict} in {estimate.usable_bytes}"
    )


def _over_limit_candidates(
    session: PlanningSession,
    found: Recipe,
    most: int | None,
    below_ns: float | None = None,
) -> Iterator[tuple[Recipe, str]]:
    """Yield recipes that are faster than ``found``, the most likely to fit first.

    Args:
        session: Gives the profile at the batch size of ``found``.
        found: The best recipe so far.
        most: Most recipes to yield; None for as many as are cheap.
        below_ns: Those that cannot take less per sample are left out.
    """
    block_chain = session.block_chain
    # Loss chunks add few ops, so that the trace without them is counted.
    count = MAX_TRACED_OPS // max(1, block_chain.op_count(found.batch_size))
    count = count if most is None else min(count, most)
    if count < 1:
        return
    chain = block_chain.profile_at(found.batch_size)
    if not any(row.mode == "offload" or row.input_on_host for row in found.segments):
        chain = without_host_options(chain)
    problem = Problem(
        chain=chain, limit_bytes=session.budget.usable_bytes, max_segment=MAX_SEGMENT
    )
    limit_ns = chain_time_ns(chain, found.segments)
    front = pareto_front(problem, MAX_FRONT_LABELS, faster_than_ns=limit_ns)
    held = (
        # At most its own bytes: what is more than the limit is left to the judge.
        in_regular_order(replace(problem, limit_bytes=peak_bytes), solution)
        # Slowest first: the front falls in bytes as it rises in time.
        for solution in reversed(front)
        if solution.segments is not None and host_holds(chain, solution.segments)
        for peak_bytes in (chain_peak_bytes(chain, solution.segments),)
    )
    micro_steps = found.gradient_accumulation_steps
    most_ns = math.inf if below_ns is None else below_ns * found.samples_per_rank
    bound = (
        chain if below_ns is None else block_chain.bounding_profile_at(found.batch_size)
    )
    apart = block_chain.streams_apart
    least = apart.profile_at(found.batch_size, exact_blocks=False)
    for solution in islice(held, count):
        segments = solution.segments or ()
        recipe = session.settings.recipe(found.batch_size, segments)
        if chain_peak_bytes(least, recipe.segments) > problem.limit_bytes:
            continue  # with the pools of all streams
        if bound.step_ns(chain_time_ns(bound, segments), micro_steps) < most_ns:
            yield recipe, solution.explanation
