import sys
from dataclasses import replace

import pytest

from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes
from budgetfit.solvers.chain_dp import chain_dp, lowest_peak, pareto_front
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.uniform_segments import best_uniform_segments
from tests.solvers.chains import (
    block,
    chain_of,
    equal_blocks,
    option,
    random_problem,
    rate_all,
    rate_solution,
    seeded,
    single,
)
from tests.solvers.exhaustive import exhaustive

KEEP = option("keep", saved=20, forward=24, backward=4)
RECOMPUTE = option("recompute", saved=1, forward=16, backward=23, extra=1)


@pytest.mark.parametrize("seed", range(10))
def test_labels_find_what_trying_everything_finds(seed: int) -> None:
    # 50 chains each; least time, then lowest peak, then fewest wrapped blocks.
    rnd = seeded(seed)
    infeasible = 0
    for _ in range(50):
        problem = random_problem(rnd, rnd.randint(1, 6))
        expected = rate_solution(problem, exhaustive(problem))
        assert rate_solution(problem, chain_dp(problem)) == expected
        infeasible += expected is None
    assert 1 <= infeasible <= 25


@pytest.mark.parametrize("seed", range(4))
def test_labels_find_the_best_of_all_segmentations_of_longer_chains(seed: int) -> None:
    rnd = seeded(100 + seed)
    for length in (7, 8):
        problem = replace(random_problem(rnd, length), max_segment=None)
        expected = min(rate_all(problem), default=None)
        assert rate_solution(problem, chain_dp(problem)) == expected


def test_the_lowest_peak_is_that_of_all_plans_and_of_those_the_fastest() -> None:
    rnd = seeded(20)
    for _ in range(150):
        problem = random_problem(rnd, rnd.randint(1, 6))
        by_peak = ((peak, time, wrapped) for time, peak, wrapped in rate_all(problem))
        peak, time, wrapped = min(by_peak, default=(None, None, None))
        found = rate_solution(problem, lowest_peak(problem))
        assert found == (None if peak is None else (time, peak, wrapped))


def test_without_a_bound_the_lowest_peak_is_the_lowest_there_is() -> None:
    chain = chain_of(*equal_blocks(8, KEEP, RECOMPUTE, gradient=3), static=1)
    problem = Problem(chain=chain, limit_bytes=sys.maxsize)
    found = lowest_peak(problem)
    assert chain_peak_bytes(chain, found.segments) == min(
        peak for _, peak, _ in rate_all(problem)
    )
    assert found.proven_optimal


def test_the_front_is_every_plan_that_no_other_beats_in_time_and_peak() -> None:
    rnd = seeded(30)
    for _ in range(150):
        problem = random_problem(rnd, rnd.randint(1, 6))
        plans = {each[:2] for each in rate_all(problem)}
        best = sorted(
            (time, peak)
            for time, peak in plans
            if not any(
                other != (time, peak) and other[0] <= time and other[1] <= peak
                for other in plans
            )
        )
        front = pareto_front(problem)
        assert [rate_solution(problem, each)[:2] for each in front] == best


def test_the_early_blocks_are_recomputed_and_the_late_ones_kept() -> None:
    # 51 bytes hold two kept blocks only behind six recomputed ones (solver S4).
    chain = chain_of(*equal_blocks(8, KEEP, RECOMPUTE, gradient=3), static=1)
    problem = Problem(chain=chain, limit_bytes=51, max_segment=1)
    assert chain_dp(problem).segments == single(0, 1, 2, 3, 4, 5)


def test_a_byte_decides_however_many_there_are() -> None:
    # A peer's knapsack rounds 2,000 items of 4e-5 each into a capacity of 0.04 and
    # takes 0.08; its neighbour answers a budget of one unit with two (facts 2.2).
    size = 10**10 + 1
    keep = option("keep", saved=size, forward=size, backward=0)
    recompute = option("recompute", saved=0, forward=0, backward=size, extra=1)
    chain = chain_of(*equal_blocks(3, keep, recompute, output=0), input_bytes=0)
    enough = Problem(chain=chain, limit_bytes=2 * size, max_segment=1)
    assert chain_dp(enough).segments == single(0)
    too_small = replace(enough, limit_bytes=2 * size - 1)
    assert chain_dp(too_small).segments == single(0, 1)


def test_what_the_optimizer_step_needs_counts() -> None:
    # A peer's plans exceed their budget by the optimizer's states (facts 2.1).
    chain = chain_of(*equal_blocks(2, KEEP, RECOMPUTE), static=100, optimizer=50)
    assert chain_dp(Problem(chain=chain, limit_bytes=149)).segments is None
    assert chain_dp(Problem(chain=chain, limit_bytes=150)).segments == ()


def test_where_the_optimizer_step_is_the_peak_nothing_is_wrapped_to_lower_it() -> None:
    free = option("recompute", saved=1, forward=16, backward=23, extra=0)
    chain = chain_of(*equal_blocks(4, KEEP, free), static=100, optimizer=500)
    assert chain_dp(Problem(chain=chain, limit_bytes=600)).segments == ()


def test_of_equally_fast_plans_that_of_lower_peak_that_wraps_less_is_taken() -> None:
    free = option("recompute", saved=1, forward=16, backward=23, extra=0)
    chain = chain_of(*equal_blocks(2, KEEP, free))
    assert chain_peak_bytes(chain, ()) == 44  # S 20 + f 24
    assert chain_peak_bytes(chain, single(0)) == 25  # S 1 + f 24; S 1 + x 1 + b 23
    assert chain_peak_bytes(chain, single(0, 1)) == 25
    found = chain_dp(Problem(chain=chain, limit_bytes=1000))
    assert found.segments == single(0)


def test_weight_copies_can_forbid_what_the_backward_would_allow() -> None:
    keep = option("keep", saved=10, forward=12, backward=2)
    recompute = option("recompute", saved=1, forward=12, backward=11, cached=6, extra=1)
    last = block("last", option("keep", saved=0, forward=14, backward=0), output=0)
    chain = chain_of(*equal_blocks(2, keep, recompute), last)
    # Recomputing both leaves 1 + 1 + 6 + 6 before the last block's 14; one of them
    # 10 + 1 + 6 and 14, keeping both 20 and 14. Backwards need less.
    expected = {34: (), 33: single(0), 31: single(0), 30: single(0, 1), 27: None}
    for limit_bytes, segments in expected.items():
        problem = Problem(chain=chain, limit_bytes=limit_bytes, max_segment=1)
        assert chain_dp(problem).segments == segments


def test_longer_segments_are_used_where_they_are_faster() -> None:
    # solver-facts, table of section 3: 24 blocks at 9 % of what keeping all takes.
    keep = option("keep", saved=17, forward=18, backward=0)
    recompute = option("recompute", saved=1, forward=2, backward=17, extra=1)
    chain = chain_of(*equal_blocks(24, keep, recompute))
    problem = Problem(chain=chain, limit_bytes=40)
    assert chain_dp(replace(problem, max_segment=1)).segments is None
    found = chain_dp(replace(problem, max_segment=4))
    assert chain_peak_bytes(chain, found.segments) <= 40
    assert max(len(each.blocks) for each in found.segments) > 1


def test_blocks_that_must_not_be_wrapped_stay_out() -> None:
    prologue = block("<prologue>", option("keep", saved=5, forward=9, backward=9))
    epilogue = block("<epilogue>", option("keep", saved=9, forward=30, backward=9))
    chain = chain_of(prologue, *equal_blocks(4, KEEP, RECOMPUTE), epilogue)
    found = lowest_peak(Problem(chain=chain, limit_bytes=sys.maxsize))
    named = {name for each in found.segments for name in each.blocks}
    assert named <= {f"layers.{number}" for number in range(4)}
    assert named


def test_with_too_many_labels_the_bounds_of_the_grid_remain() -> None:
    rnd = seeded(60)
    apart = 0
    for _ in range(60):
        problem = random_problem(rnd, rnd.randint(2, 5), most_others=2)
        best = rate_solution(problem, exhaustive(problem))
        found = chain_dp(problem, max_labels=0)
        if best is None:
            assert found.segments is None
            continue
        time_ns, peak_bytes, _ = rate_solution(problem, found)
        assert found.lower_bound_ns <= best[0] <= time_ns
        assert peak_bytes <= problem.limit_bytes
        assert not found.proven_optimal or time_ns == best[0]
        apart += found.lower_bound_ns < time_ns
    assert apart < 60


def test_too_many_labels_leave_the_best_single_segment_length_as_the_lowest_peak() -> (
    None
):
    chain = chain_of(*equal_blocks(8, KEEP, RECOMPUTE, gradient=3), static=1)
    problem = Problem(chain=chain, limit_bytes=10**9)
    found = lowest_peak(problem, max_labels=0)
    assert found.segments == best_uniform_segments(problem)
    assert not found.proven_optimal
    assert "nothing is proven" in found.explanation
    peak_bytes = chain_peak_bytes(chain, found.segments)
    too_small = replace(problem, limit_bytes=peak_bytes - 1)
    assert lowest_peak(too_small, max_labels=0).segments is None


def test_a_thinned_front_is_of_plans_that_fit_and_claims_no_proof() -> None:
    chain = chain_of(*equal_blocks(12, KEEP, RECOMPUTE, gradient=3), static=1)
    problem = Problem(chain=chain, limit_bytes=150)
    whole = [rate_solution(problem, each) for each in pareto_front(problem)]
    thinned = pareto_front(problem, max_labels=4)
    rated = [rate_solution(problem, each) for each in thinned]
    assert 1 < len(rated) <= 4 < len(whole)
    assert rated == sorted(rated)
    assert all(peak <= 150 for _, peak, _ in rated)
    assert not any(each.proven_optimal for each in thinned)
    assert all(each.lower_bound_ns is None for each in thinned)


def test_an_answer_explains_itself() -> None:
    chain = chain_of(*equal_blocks(8, KEEP, RECOMPUTE, gradient=3), static=1)
    found = chain_dp(Problem(chain=chain, limit_bytes=51, max_segment=1))
    assert found.explanation.startswith(
        "6 of 8 blocks are recomputed, in 6 segments of 1; "
        "no plan within the budget is faster (at most "
    )
    none = chain_dp(Problem(chain=chain, limit_bytes=10))
    assert none.proven_optimal
    assert none.segments is None
    assert none.explanation == (
        "No plan is within the budget, however much is recomputed."
    )


def test_of_plans_equal_in_everything_the_one_that_wraps_earlier_blocks_is_taken() -> (
    None
):
    # The optimizer step is the peak: which block is kept does not show.
    late = block("late", option("keep", saved=0, forward=40, backward=0), output=0)
    chain = chain_of(*equal_blocks(3, KEEP, RECOMPUTE), late, optimizer=90)
    problem = Problem(chain=chain, limit_bytes=90, max_segment=1)
    assert chain_peak_bytes(chain, ()) > 90
    assert chain_dp(problem).segments == single(0)


def test_a_deep_chain_of_blocks_that_all_differ_is_solved_within_the_budget() -> None:
    rnd = seeded(50)
    blocks = []
    for number in range(60):
        saved, extra = rnd.randint(16_000, 20_000), rnd.randint(900, 1200)
        keep = option("keep", saved, saved + 1000, 3000)
        recompute = option("recompute", 1000, 9000, saved + 3000, extra=extra)
        blocks.append(
            block(f"layers.{number}", keep, recompute, gradient=500, output=1000)
        )
    chain = chain_of(*blocks, input_bytes=1000)
    limit_bytes = chain_peak_bytes(chain, ()) // 3
    found = chain_dp(Problem(chain=chain, limit_bytes=limit_bytes, max_segment=4))
    assert found.proven_optimal
    peak_bytes = chain_peak_bytes(chain, found.segments)
    # The budget is used up to what one block more or less makes.
    assert limit_bytes - 4000 < peak_bytes <= limit_bytes
    assert all(isinstance(each, Segment) for each in found.segments)
