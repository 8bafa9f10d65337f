"""Each constant and decision of the search has a law: no model is traced for them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.budget import Budget
from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.core.parallelism import Engine, Parallelism
from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError, Suggestion
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.planning.alternatives import refusal, training_changes
from budgetfit.planning.alternatives.alternatives import accumulating_rows
from budgetfit.planning.profiling.block_chain import TrainingSettings
from budgetfit.planning.search import loss_chunking, lowest_peak, search
from budgetfit.planning.search.accumulation import accumulation_row
from budgetfit.planning.search.search import SearchResult
from budgetfit.planning.search.solver_choice import fastest_plan, optimality_text
from budgetfit.planning.session import PlanningSession, Request
from budgetfit.solvers.batch_size import BatchCandidate
from budgetfit.solvers.problem import Problem, Solution
from tests.models import MIB
from tests.solvers.chains import block, chain_of, equal_blocks, option, single

USABLE = 1000 * MIB
KEEP = option("keep", 20 * MIB, 20 * MIB, 4 * MIB)
RECOMPUTE = option("recompute", MIB, 20 * MIB, 23 * MIB, extra=5)
CHAIN = chain_of(*equal_blocks(6, KEEP, RECOMPUTE, gradient=1))


def session(
    chain: ChainProfile = CHAIN,
    usable: int = USABLE,
    ops: int = 1000,
    loss_chunks: int = 1,
    **request: Any,
) -> PlanningSession:
    traces = SimpleNamespace(
        log=[],
        workload=SimpleNamespace(blocks=(), model=nn.Module()),
        exact=lambda _: SimpleNamespace(events=()),
        is_affine=lambda _: True,
        smallest_batch=lambda _: 1,
        smallest_searched=lambda _: 1,
    )
    settings = TrainingSettings(
        precision="fp32", optimizer="sgd", accumulation=2, loss_chunks=loss_chunks
    )
    block_chain: Any = SimpleNamespace(
        traces=traces,
        settings=settings,
        profile_at=lambda size, **_: replace(chain, batch_size=size),
        bounding_profile_at=lambda size: replace(chain, batch_size=size),
        profiles_within=lambda _limit, **_: None,
        op_count=lambda _: ops,
    )
    block_chain.streams_apart = block_chain
    budget = Budget(total_bytes=usable, context_bytes=0, headroom_bytes=0)
    return PlanningSession(block_chain, Request(budget=budget, **request))


OFFLOADING = Recipe(batch_size=1, segments=(Segment(("block",), "offload"),))


def estimate(
    reserved: int,
    *,
    recipe: Recipe | None = None,
    fits: bool | None = None,
    step_ms: float = 100.0,
    at_peak: dict[str, int] | None = None,
) -> Estimate:
    timeline = MemoryTimeline(
        points=(), allocated_bytes=reserved, reserved_bytes=reserved, at_peak_bytes={}
    )
    return Estimate(
        recipe=recipe or Recipe(batch_size=1),
        allocated_bytes=reserved,
        reserved_bytes=reserved,
        process_bytes=reserved,
        phase_peaks_bytes={},
        at_peak_bytes=at_peak or {},
        step_ms=step_ms,
        timeline=timeline,
        fits=reserved <= USABLE if fits is None else fits,
        usable_bytes=USABLE,
    )


def candidate(peak: int, ns_per_sample: Any = 1) -> BatchCandidate:
    solution = Solution(segments=(), proven_optimal=True, explanation="")
    return BatchCandidate(
        batch_size=1,
        gradient_accumulation_steps=1,
        solution=solution,
        peak_bytes=peak,
        ns_per_sample=ns_per_sample,
    )


def limits(now: int, **fields: int) -> Any:
    return search._Limits(
        **{"limit_bytes": USABLE, "now": now, "refused": USABLE + 1, **fields}
    )


def test_the_limit_grows_by_the_unused_bytes_above_two_per_cent() -> None:
    for unused, again in ((20 * MIB, False), (21 * MIB, True)):
        made = limits(900 * MIB)
        fitting = estimate(USABLE - unused)
        assert made.moved(candidate(880 * MIB), fitting, fitting) == again
        assert made.now == 900 * MIB + unused * again


@pytest.mark.parametrize(("found_within", "left"), [(400, 500), (600, 200), (900, 200)])
def test_where_a_large_batch_reserves_too_much_a_small_ones_room_is_left(
    found_within: int, left: int
) -> None:
    """The first limit leaves what is reserved beyond live bytes, by batch size."""
    reserves = {8: 500 * MIB, 1: 200 * MIB}
    fake: Any = SimpleNamespace(
        budget=SimpleNamespace(usable_bytes=USABLE),
        smallest_searched=1,
        block_chain=SimpleNamespace(reserve_bytes=lambda size, **_: reserves[size]),
    )

    class Proposals:
        def roughly(self, limit_bytes: int) -> SimpleNamespace:
            large = replace(candidate(0), batch_size=8)
            fits = limit_bytes >= found_within * MIB
            return SimpleNamespace(best=large if fits else None)

    proposals: Any = Proposals()
    made = search._Limits.of(fake, proposals)
    assert made.now == USABLE - left * MIB


@pytest.mark.parametrize(("kept", "left"), [(True, 500), (False, 200)])
def test_other_programs_count_unless_everything_kept_is_proposed(
    kept: bool, left: int
) -> None:
    """With everything kept 500 MiB are reserved beyond live bytes, else 200 MiB."""

    def reserve_bytes(_: int, enough: Callable[[int], bool]) -> int:
        return 500 * MIB if enough(500 * MIB) else 200 * MIB

    fake: Any = SimpleNamespace(
        budget=SimpleNamespace(usable_bytes=USABLE),
        smallest_searched=1,
        block_chain=SimpleNamespace(reserve_bytes=reserve_bytes),
    )

    def roughly(limit_bytes: int) -> SimpleNamespace:
        found = candidate(0)
        if limit_bytes < USABLE and not kept:
            segments = (Segment(("a",)),)
            found = replace(found, solution=replace(found.solution, segments=segments))
        return SimpleNamespace(best=found)

    proposals: Any = SimpleNamespace(roughly=roughly)
    made = search._Limits.of(fake, proposals)
    assert made.now == USABLE - left * MIB


def test_where_all_proposals_were_refused_the_lowest_peak_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Within its limit the first is refused; within the next one nothing is.
    first, lowest = candidate(900 * MIB), candidate(500 * MIB)
    segments = (Segment(("a",)),)
    lowest = replace(lowest, solution=replace(lowest.solution, segments=segments))

    class Proposals:
        def __init__(self, *_: object) -> None: ...

        def roughly(self, _: int) -> SimpleNamespace:
            return SimpleNamespace(best=None)

        def within(self, limit_bytes: int) -> BatchCandidate | None:
            return first if limit_bytes >= 900 * MIB else None

        def lowest(self) -> BatchCandidate:
            return lowest

    def judge(_: PlanningSession, recipe: Recipe) -> Estimate:
        return estimate((500 if recipe.segments else 1200) * MIB, recipe=recipe)

    monkeypatch.setattr(search, "_Proposals", Proposals)
    monkeypatch.setattr(PlanningSession, "judge", judge)
    found = search.search_within_limits(session(), 8)
    assert found.estimate is not None
    assert found.estimate.recipe.segments == segments


def test_the_limit_shrinks_by_the_excess_and_at_least_by_eight_mib() -> None:
    for excess, now in ((30 * MIB, 870 * MIB), (MIB, 892 * MIB)):
        made = limits(900 * MIB)
        judged = estimate(USABLE + excess)
        assert made.moved(candidate(900 * MIB), judged, None)
        assert made.now == now


@pytest.mark.parametrize(
    ("unused_mib", "room_mib", "gain", "again"),
    [
        (31, 17, 0.06, True),
        (30, 17, 0.06, False),
        (31, 16, 0.06, False),
        (31, 17, 0.049, False),
    ],
)
def test_a_round_between_two_limits_has_to_be_worth_it(
    *, unused_mib: int, room_mib: int, gain: float, again: bool
) -> None:
    now = 900 * MIB
    made = limits(now, agreed=now - room_mib * MIB)
    best = estimate(USABLE - unused_mib * MIB, step_ms=1.0)  # 1e6 ns per sample
    chosen = candidate(now, ns_per_sample=round(1e6 * (1 - gain)))
    assert made.moved(chosen, estimate(USABLE + MIB), best) == again


def over_limit(
    ops: int, found: tuple[Segment, ...], most: int | None = None
) -> list[Recipe]:
    tight = session(usable=chain_peak_bytes(CHAIN, ()) - 1, ops=ops)
    recipe = tight.settings.recipe(8, found)
    made = search._over_limit_candidates(tight, recipe, most)
    return [each for each, _ in made]


def test_faster_plans_above_the_limit_are_judged_while_traces_are_short() -> None:
    all_recomputed = single(0, 1, 2, 3, 4, 5)
    found = over_limit(1000, all_recomputed)
    times = [chain_time_ns(CHAIN, each.segments) for each in found]
    assert len(found) > 2
    assert times == sorted(times, reverse=True)
    assert times[0] < chain_time_ns(CHAIN, all_recomputed)
    assert over_limit(10_000, all_recomputed) == found[:2]
    assert over_limit(1000, all_recomputed, most=1) == found[:1]
    assert over_limit(20_001, all_recomputed) == []
    assert over_limit(1000, all_recomputed, most=0) == []


def test_near_misses_are_left_out_where_something_else_is_faster() -> None:
    """A loss in parts may be faster than all, or than some of them."""
    tight = session(usable=chain_peak_bytes(CHAIN, ()) - 1)
    slowest = tight.settings.recipe(8, single(0, 1, 2, 3, 4, 5))

    def made(below_ns: float | None) -> list[Recipe]:
        candidates = search._over_limit_candidates(tight, slowest, None, below_ns)
        return [recipe for recipe, _ in candidates]

    tried = made(None)
    times = [chain_time_ns(CHAIN, each.segments) / 8 for each in tried]
    assert len(set(times)) == len(times) > 2
    assert made(2 * times[0]) == tried
    assert made(times[0]) == tried[1:]
    assert made(times[1]) == tried[2:]
    assert made(times[-1]) == []


def test_near_misses_are_left_out_that_the_pools_of_all_streams_rule_out() -> None:
    tight = session(usable=chain_peak_bytes(CHAIN, ()) - 1)
    slowest = tight.settings.recipe(8, single(0, 1, 2, 3, 4, 5))

    def made() -> list[Recipe]:
        candidates = search._over_limit_candidates(tight, slowest, None)
        return [recipe for recipe, _ in candidates]

    tried = made()
    peaks = [chain_peak_bytes(CHAIN, each.segments) for each in tried]
    beside = tight.budget.usable_bytes - peaks[1]  # as much is on other streams
    apart = session(replace(CHAIN, static_bytes=CHAIN.static_bytes + beside))
    block_chain: Any = tight.block_chain
    block_chain.streams_apart = apart.block_chain
    assert made() == [
        each
        for each, peak in zip(tried, peaks, strict=True)
        if peak + beside <= tight.budget.usable_bytes
    ]
    assert 0 < len(made()) < len(tried)


@pytest.mark.parametrize(("saved_ns", "on_host"), [(4, False), (5, True)])
def test_host_memory_is_used_where_it_gains_two_per_cent(
    *, saved_ns: int, on_host: bool
) -> None:
    # Seven blocks of 30 ns, of which one is recomputed: 2 % of 230 ns are 4.6.
    slow = replace(RECOMPUTE, extra_ns=20)
    offload = option("offload", MIB, 20 * MIB, 4 * MIB, extra=20 - saved_ns)
    first = block("first", KEEP, slow, offload)
    chain = chain_of(first, *equal_blocks(6, KEEP, slow))
    limit_bytes = chain_peak_bytes(chain, (Segment(("first",)),))
    found = fastest_plan(Problem(chain=chain, limit_bytes=limit_bytes))
    assert found.segments is not None
    assert ("offload" in {each.mode for each in found.segments}) == on_host


@pytest.mark.parametrize(
    ("with_host_ms", "hopeful", "offloads"),
    [(100, True, False), (97.9, True, True), (98.1, True, False), (101, False, True)],
)
def test_what_offloads_is_two_per_cent_faster_than_what_does_not(
    monkeypatch: pytest.MonkeyPatch,
    with_host_ms: float,
    *,
    hopeful: bool,
    offloads: bool,
) -> None:
    """As both are judged: the allocator may reserve less for the slower of them."""
    own = session()
    host = estimate(MIB, step_ms=with_host_ms, recipe=OFFLOADING)
    plain = SearchResult(session=session(), estimate=estimate(MIB, step_ms=100))
    monkeypatch.setattr(loss_chunking, "can_gain", lambda *_: hopeful)
    monkeypatch.setattr(loss_chunking, "search_without_host", lambda *_: plain)
    found = SearchResult(session=own, estimate=host)
    better = loss_chunking.better_without_host(found)
    assert better.estimate is (host if offloads else plain.estimate)
    assert better.session is own  # with host memory for what is compared later
    assert loss_chunking.better_without_host(plain) is plain


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_whole_loss_that_is_slower_without_the_host_is_not_searched(
    monkeypatch: pytest.MonkeyPatch, *, in_parts: bool
) -> None:
    """Unless its parts may be as fast: then both are compared."""
    parts, searched = session(), []

    def can_gain(asked: PlanningSession, _: object, __: float, *change: object) -> bool:
        if change:
            return change[0] is not loss_chunking.without_host_options
        assert asked is parts
        return in_parts

    def search_without_host(*_: object) -> SearchResult:
        searched.append(1)
        return SearchResult(session=session(), estimate=None)

    monkeypatch.setattr(loss_chunking, "can_gain", can_gain)
    monkeypatch.setattr(loss_chunking, "_worth_trying", lambda *_: [parts])
    monkeypatch.setattr(loss_chunking, "search_without_host", search_without_host)
    host = estimate(MIB, recipe=OFFLOADING)
    found = SearchResult(session=session(), estimate=host)
    assert loss_chunking.better_without_host(found) is found
    assert bool(searched) == in_parts


def only_these(
    monkeypatch: pytest.MonkeyPatch,
    plain: PlanningSession,
    chunked: PlanningSession,
    searched: Callable[..., SearchResult],
) -> None:
    """Search a plain loss and a chunked one with ``searched``, whatever they hold."""
    for name, function in {
        "everything_kept": lambda *_: None,
        "search": searched,
        "search_within_limits": searched,
        "with_near_misses": lambda found, *_, **__: found,
        "with_more_loss_chunks": lambda *_: [plain, chunked],
    }.items():
        monkeypatch.setattr(loss_chunking, name, function)
    monkeypatch.setattr(loss_chunking, "MIN_BUDGET_SHARE", 0.0)


@pytest.mark.parametrize(("gain", "taken"), [(0.009, False), (0.011, True)])
def test_a_chunked_loss_has_to_gain_one_per_cent(
    *, monkeypatch: pytest.MonkeyPatch, gain: float, taken: bool
) -> None:
    plain, chunked = session(), session(loss_chunks=8)
    step_ms = {id(plain): 100.0, id(chunked): 100 * (1 - gain)}

    def searched(asked: PlanningSession, *_: int, **__: int) -> SearchResult:
        found = estimate(MIB, step_ms=step_ms[id(asked)])
        return SearchResult(session=asked, estimate=found)

    only_these(monkeypatch, plain, chunked, searched)
    monkeypatch.setattr(loss_chunking, "can_gain", lambda *_: True)
    monkeypatch.setattr(loss_chunking, "_search_ahead", lambda *_: None)
    solved = SimpleNamespace(best=None)
    monkeypatch.setattr(loss_chunking, "fastest_by_formula", lambda *_: solved)
    found = loss_chunking.search_with_loss_chunks(plain).session
    assert found is (chunked if taken else plain)


@pytest.mark.parametrize(
    ("plain_ms", "bound_ms", "searched", "taken"),
    [
        (102.0, 102.0, ["chunked"], "chunked"),
        (102.0, 100.5, ["chunked", "plain"], "chunked"),
        (100.5, 100.5, ["chunked", "plain"], "plain"),
    ],
)
def test_a_plain_loss_that_cannot_win_is_not_searched(
    *,
    monkeypatch: pytest.MonkeyPatch,
    plain_ms: float,
    bound_ms: float,
    searched: list[str],
    taken: str,
) -> None:
    """Nor is a chunked one searched twice. It takes 100 ms, and has to gain 1 %."""
    plain, chunked = session(), session(loss_chunks=8)
    asked: list[str] = []

    def search_one(one: PlanningSession, *_: int, **__: int) -> SearchResult:
        name = "plain" if one is plain else "chunked"
        asked.append(name)
        step_ms = plain_ms if one is plain else 100.0
        return SearchResult(session=one, estimate=estimate(MIB, step_ms=step_ms))

    def can_gain(
        one: PlanningSession, known: Estimate, gain: float, *_: object
    ) -> bool:
        least_ms = bound_ms if one is plain else 100.0
        return least_ms < known.step_ms * (1 - gain)

    def solved(one: PlanningSession, *ideal: Any, **_: bool) -> SimpleNamespace:
        in_chunks = one is chunked or any(ideal)
        return SimpleNamespace(best=candidate(0, 90 if in_chunks else 100))

    chain: Any = plain.block_chain
    chain.all_kept = lambda _: SimpleNamespace(batch_sizes=(2, 3))
    chain.waiting_phases = lambda _: 0
    only_these(monkeypatch, plain, chunked, search_one)
    monkeypatch.setattr(loss_chunking, "can_gain", can_gain)
    monkeypatch.setattr(loss_chunking, "fastest_by_formula", solved)
    found = loss_chunking.search_with_loss_chunks(plain).session
    assert found is (chunked if taken == "chunked" else plain)
    assert asked == searched


@pytest.mark.parametrize(
    ("least", "searched", "taken"),
    [
        (8, [1, 8, 16, 32, 64, 256], 256),
        (32, [1, 8, 64, 16, 32, 256], 256),
        (256, [1, 8, 64, 256], 256),
        (999, [1, 8, 64, 256], 1),
    ],
)
def test_a_refusal_searches_few_numbers_of_chunks(
    *, monkeypatch: pytest.MonkeyPatch, least: int, searched: list[int], taken: int
) -> None:
    """Only from ``least`` chunks on does anything fit, and more are faster."""
    counts = (1, *loss_chunking.LOSS_CHUNKS)
    sessions = {count: session(loss_chunks=count) for count in counts}
    asked: list[int] = []

    def search_one(one: PlanningSession, *_: int, **__: int) -> SearchResult:
        count = one.settings.loss_chunks
        asked.append(count)
        found = estimate(MIB, step_ms=100 / count) if count >= least else None
        return SearchResult(session=one, estimate=found)

    only_these(monkeypatch, sessions[1], sessions[8], search_one)
    for name, function in {
        "can_gain": lambda *_: True,
        "_search_ahead": lambda *_: None,
        "fastest_by_formula": lambda *_: SimpleNamespace(best=None),
        "with_more_loss_chunks": lambda _, counts=loss_chunking.LOSS_CHUNKS: [
            sessions[1],
            *map(sessions.get, counts),
        ],
    }.items():
        monkeypatch.setattr(loss_chunking, name, function)
    found = loss_chunking.search_with_loss_chunks(sessions[1])
    assert (asked, found.session.settings.loss_chunks) == (searched, taken)


@pytest.mark.parametrize(("gains", "searched"), [(False, [1, 8]), (True, [1, 8, 16])])
def test_more_chunks_are_traced_where_the_bytes_that_they_divide_may_gain(
    *, monkeypatch: pytest.MonkeyPatch, gains: bool, searched: list[int]
) -> None:
    sessions = [session(loss_chunks=count) for count in (1, 8, 16)]
    asked: list[int] = []
    shares: list[float] = []

    def search_one(one: PlanningSession, *_: int, **__: int) -> SearchResult:
        asked.append(one.settings.loss_chunks)
        found = estimate(MIB, step_ms=100 / one.settings.loss_chunks)
        return SearchResult(session=one, estimate=found)

    def can_gain(_: object, *known: Any) -> bool:
        share = getattr(known[-1], "args", ())  # of the head's bytes
        shares.extend(share)
        return gains or not share

    only_these(monkeypatch, sessions[0], sessions[1], search_one)
    for name, function in {
        "can_gain": can_gain,
        "_search_ahead": lambda *_: None,
        "fastest_by_formula": lambda *_: SimpleNamespace(best=None),
        "with_more_loss_chunks": lambda *_: sessions,
    }.items():
        monkeypatch.setattr(loss_chunking, name, function)
    loss_chunking.search_with_loss_chunks(sessions[0])
    assert (asked, shares) == (searched, [8 / 16])


@pytest.mark.parametrize(("objective", "always"), [("throughput", 0), ("memory", 1)])
@pytest.mark.parametrize(("ns_per_sample", "gains"), [(98.9, 1), (99.1, 0)])
def test_nothing_is_searched_where_the_solver_finds_nothing_faster(
    monkeypatch: pytest.MonkeyPatch,
    objective: Any,
    always: int,
    ns_per_sample: float,
    gains: int,
) -> None:
    fastest = candidate(USABLE, ns_per_sample)
    monkeypatch.setattr(
        search,
        "best_batch",
        lambda _asked, _profile, _solve, limit=None, **_: SimpleNamespace(
            best=fastest if limit is None else None
        ),
    )
    asked = session(objective=objective)
    # The solver's times know nothing of what verify measured: here twice as long.
    known = replace(estimate(MIB, step_ms=200e-6), time_factor=2.0)
    assert search.can_gain(asked, known, 0.01) == bool(always or gains)


def test_chunks_take_no_bytes_at_best_and_run_the_head_once_more() -> None:
    loss = block("loss", option("keep", 5, 6, 7))  # 10 ns forward, 20 backward
    (head,) = loss_chunking.chunked_best(chain_of(loss)).blocks
    keep = head.keep
    assert (keep.saved_bytes, keep.forward_bytes, keep.backward_bytes) == (0, 0, 0)
    assert (head.forward_ns, head.backward_ns) == (10, 28)


@pytest.mark.parametrize("static", [0.0, 0.75])
@pytest.mark.parametrize(("share", "tried"), [(0.049, 0), (0.051, 1)])
def test_chunks_are_tried_where_the_loss_is_five_per_cent_of_what_weights_leave(
    monkeypatch: pytest.MonkeyPatch, static: float, share: float, tried: int
) -> None:
    loss = block("loss", option("keep", 0, round(share * (1 - static) * USABLE), 0))
    chain = chain_of(loss, static=round(static * USABLE))
    asked, chunked = (session(chain, loss_chunks=n) for n in (1, 8))
    monkeypatch.setattr(
        loss_chunking, "with_more_loss_chunks", lambda *_: [asked, chunked]
    )
    worth_trying = loss_chunking._worth_trying
    assert len(list(worth_trying(asked, 1))) == tried


@pytest.mark.parametrize(("divided", "most"), [(0.39, 8), (0.41, 64), (3.3, 256)])
def test_more_chunks_are_tried_while_what_they_divide_is_five_per_cent(
    monkeypatch: pytest.MonkeyPatch, divided: float, most: int
) -> None:
    """A cast of the head's weight, here 30 % of the budget, is in every chunk."""

    def chunked(chunks: int) -> PlanningSession:
        share = 0.3 + divided / chunks
        loss = block("loss", option("keep", 0, round(share * USABLE), 0))
        return session(chain_of(loss), loss_chunks=chunks)

    asked = [chunked(n) for n in (1, 8, 64, 256)]
    monkeypatch.setattr(loss_chunking, "with_more_loss_chunks", lambda *_: asked)
    worth_trying = loss_chunking._worth_trying
    tried = [each.settings.loss_chunks for each in worth_trying(asked[0], 1)]
    assert tried[-1] == most


def test_the_certificate_says_how_far_from_the_fastest_a_plan_can_be() -> None:
    roomy, slow = session(), single(0, 1)
    kept = estimate(1, recipe=Recipe(batch_size=1))
    assert optimality_text(roomy, kept) == (
        "by these times no other checkpointing of this batch size is faster (proven)"
    )
    recipe = Recipe(batch_size=1, segments=slow)
    for judged_ns in (chain_time_ns(CHAIN, slow), 2 * chain_time_ns(CHAIN, slow)):
        share = 1 - chain_time_ns(CHAIN, ()) / judged_ns
        judged = estimate(1, recipe=recipe, step_ms=judged_ns / 1e6)
        assert optimality_text(roomy, judged) == (
            "by these times no other checkpointing of this batch size is over "
            f"{100 * share:.1f} % faster (proven)"
        )
    steps = replace(recipe, gradient_accumulation_steps=4)
    slow_optimizer = session(replace(CHAIN, optimizer_ns=10**6))
    step_ns = 10**6 + 4 * chain_time_ns(CHAIN, slow)
    judged = estimate(1, recipe=steps, step_ms=step_ns / 1e6)
    assert optimality_text(slow_optimizer, judged) == optimality_text(roomy, kept)


def test_accumulation_is_promised_after_four_micro_batches_were_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[int] = []

    def judge(_: PlanningSession, recipe: Recipe) -> Estimate:
        judged.append(recipe.gradient_accumulation_steps)
        return estimate(len(judged) * MIB, recipe=recipe)

    monkeypatch.setattr(PlanningSession, "judge", judge)
    (row,), (note,) = accumulation_row(session(), estimate(MIB))
    assert row.estimate.recipe.gradient_accumulation_steps == 2
    assert row.fits
    assert row.is_suggestion
    assert judged == [2, 4]
    assert accumulating_rows(session(), estimate(MIB)) == ()  # this one has room
    assert "any gradient_accumulation_steps fits (2 MiB reserved from 2 on)" in note


def rated(peak: int, reserved: int, fits: dict[Recipe, int]) -> Any:
    recipe = Recipe(batch_size=len(fits) + 1)
    fits[recipe] = reserved
    return lowest_peak._Rated(peak, 0, session(), recipe)


def test_a_recipe_far_above_by_the_formula_is_never_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserved: dict[Recipe, int] = {}
    judged: list[Recipe] = []

    def judge(_: PlanningSession, recipe: Recipe) -> Estimate:
        judged.append(recipe)
        return estimate(reserved[recipe])

    monkeypatch.setattr(PlanningSession, "judge", judge)
    first = rated(USABLE, 2 * USABLE, reserved)
    near = rated(2 * USABLE * 119 // 100, 2 * USABLE, reserved)
    far = rated(2 * USABLE * 121 // 100, USABLE, reserved)
    assert lowest_peak._least_judged([first, near, far]) is not None
    assert judged == [first.recipe, near.recipe]
    assert near.is_above(2 * USABLE * 119 // 120 - MIB)
    assert not near.is_above(2 * USABLE)


@pytest.mark.parametrize(
    ("faster", "smaller", "shown"),
    [(1.011, 1.0, True), (1.009, 1.0, False), (1.0, 0.98, True), (1.0, 0.995, False)],
)
def test_a_change_of_training_has_to_gain_one_per_cent(
    *, monkeypatch: pytest.MonkeyPatch, faster: float, smaller: float, shown: bool
) -> None:
    plan = estimate(USABLE)
    changed = estimate(round(USABLE * smaller), step_ms=plan.step_ms / faster)
    monkeypatch.setattr(training_changes, "_solved", lambda *_: [changed])
    monkeypatch.setattr(PlanningSession, "judge", lambda *_: changed)
    change = training_changes.TrainingChange("", {}, session, "")
    assert (training_changes._best(change, plan) is changed) == shown


def test_another_card_trains_the_same() -> None:
    card = {"gpu": "l4", "vram": None}
    assert not refusal.suggestion(card, estimate(USABLE)).changes_training


@pytest.mark.parametrize(("freed_mib", "tried"), [(99, False), (100, True)])
def test_a_suggestion_that_frees_too_little_is_not_tried(
    *, monkeypatch: pytest.MonkeyPatch, freed_mib: int, tried: bool
) -> None:
    least = estimate(USABLE + 100 * MIB, at_peak={"optimizer_state": freed_mib * MIB})
    asked: list[PlanningSession] = []

    def not_found(changed: PlanningSession) -> None:
        asked.append(changed)
        raise InputError("it was tried")

    sgd = ({"optimizer": "sgd"}, session)
    monkeypatch.setattr(refusal, "_changes", lambda _: [sgd])
    monkeypatch.setattr(refusal, "fitting_or_lowest", not_found)
    changes = refusal.changes_of_session(session(), least)
    assert list(refusal.suggestions(changes)) == []
    assert bool(asked) == tried


@pytest.mark.parametrize("engine", [None, "ddp", "fsdp2"])
def test_no_change_of_training_is_tried_where_the_weights_alone_are_too_large(
    monkeypatch: pytest.MonkeyPatch, engine: Engine | None
) -> None:
    changed = ({"precision": "bf16"}, session)
    monkeypatch.setattr(refusal, "_changes", lambda _: [changed])
    for weights, tried in ((USABLE // 2, True), (USABLE // 2 + 1, engine == "fsdp2")):
        # In half precision.
        model = nn.Linear(weights, 1, bias=False, device="meta", dtype=torch.float32)
        large: Any = session()
        large.workload.model = model
        several = engine and Parallelism(engine=engine, gpus=2)
        settings = replace(large.settings, parallelism=several)
        large.block_chain.settings = settings
        changes = refusal.changes_of_session(large, estimate(USABLE + MIB))
        assert bool(list(changes)) == tried


@pytest.mark.parametrize(("floor", "tried"), [(USABLE, True), (USABLE + 1, False)])
def test_no_choice_of_what_is_recomputed_is_tried_where_none_can_be_enough(
    *, monkeypatch: pytest.MonkeyPatch, floor: int, tried: bool
) -> None:
    least = estimate(USABLE + MIB)
    timeline: Any = SimpleNamespace(floor_bytes=floor)
    least = replace(least, timeline=timeline)
    rows = [({name: None}, session) for name in ("checkpointing", "host_ram")]
    monkeypatch.setattr(refusal, "_changes", lambda _: rows)
    assert bool(list(refusal.changes_of_session(session(), least))) == tried


@pytest.mark.parametrize("loads", [True, False])
def test_where_a_base_cannot_be_loaded_only_what_changes_that_is_tried(
    *, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    asked: list[str] = []

    def change(name: str) -> refusal.Change:
        return refusal.Change(name, partial(asked.append, name))

    own, kept = ["host_ram", "precision"], ["gpu", "prepare_for_kbit"]
    monkeypatch.setattr(refusal, "changes_of_session", lambda *_: map(change, own))
    monkeypatch.setattr(PlanningSession, "base_loads", loads)
    least = estimate(2 * USABLE, at_peak={"batch": 1})
    refused: Any = refusal.Refusal(session(), least, 0)
    refused.session.workload.notes = ()
    more = [*kept, "max_length"]
    refusal.does_not_fit_error(refused, lambda _: map(change, more))
    assert asked == ([*own, *more] if loads else kept)


def test_second_changes_are_solved_only_where_first_ones_are_too_few() -> None:
    asked: list[str] = []

    def change(argument: str, value: str, *, fits: bool = True) -> refusal.Change:
        def solve() -> Suggestion | None:
            asked.append(value)
            found = refusal.suggestion({argument: value}, estimate(USABLE))
            return found if fits else None

        return refusal.Change(argument, solve)

    eight, sgd = change("optimizer", "8bit", fits=False), change("optimizer", "sgd")
    lora, qlora = change("method", "lora"), change("method", "qlora")
    large, larger = change("gpu", "l40s"), change("gpu", "h100-pcie")
    told = list(refusal.suggestions([eight, sgd, lora, qlora, large, larger]))
    assert asked == ["8bit", "sgd", "lora", "l40s"]
    assert [next(iter(row.arguments.values())) for row in told] == asked[1:]
    asked.clear()
    told = list(refusal.suggestions([lora, qlora, large, larger]))
    assert asked == ["lora", "l40s", "qlora", "h100-pcie"]  # the second of each is next
    assert len(told) == len(asked)


def test_another_effective_batch_size_takes_the_optimizer_once() -> None:
    # Two micro-batches of 45 ms and an optimizer of 10.
    two = replace(
        estimate(MIB, recipe=Recipe(batch_size=4, gradient_accumulation_steps=2)),
        optimizer_ms=10.0,
        step_range_ms=(80.0, 120.0),
    )
    once = two.with_samples(4)
    assert once is not None
    assert once.step_ms == 55
    assert once.step_range_ms == pytest.approx((44, 66))
    assert two.with_samples(8) == two
    stored = replace(two, step_range_ms=None).with_samples(4)
    assert stored is not None
    assert stored.step_range_ms is None
