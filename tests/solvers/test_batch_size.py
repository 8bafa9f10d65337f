from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from budgetfit.core.block_profile import ChainProfile
from budgetfit.planning.search.solver_choice import fastest_plan_bounds
from budgetfit.solvers.batch_size import (
    BatchCandidate,
    BatchChoice,
    Objective,
    choose_batch_size,
)
from budgetfit.solvers.batch_size_grid import (
    LARGEST_BATCH_SIZE,
    batch_size_grid,
    fitting_batch_sizes,
    largest_fitting_batch,
)
from budgetfit.solvers.chain_dp import chain_dp, lowest_peak
from budgetfit.solvers.problem import Problem, Solution
from tests.solvers.chains import block, chain_of, option

STATIC = 1000


def profile_at(
    batch_size: int, *, optimizer_ns: int = 600, overhead_ns: int = 0
) -> ChainProfile:
    """Four blocks whose bytes and times grow with the batch.

    Keeping all takes 1000 + 40 per sample, recomputing all 1000 + 14 per sample. A
    forward is 10 ns per sample, a backward 20, and recomputing 10 more.
    """
    keep = option("keep", 10 * batch_size, 10 * batch_size, 0)
    recompute = option(
        "recompute", batch_size, 10 * batch_size, 9 * batch_size, extra=10 * batch_size
    )
    blocks = [
        replace(
            block(f"layers.{number}", keep, recompute, output=batch_size),
            forward_ns=10 * batch_size + overhead_ns,
            backward_ns=20 * batch_size,
        )
        for number in range(4)
    ]
    chain = chain_of(
        *blocks, static=STATIC, input_bytes=batch_size, optimizer_ns=optimizer_ns
    )
    return replace(chain, batch_size=batch_size)


def choose(
    limit_bytes: int,
    objective: Objective = "throughput",
    solve: Callable[[Problem], Solution] = chain_dp,
    profile: Callable[[int], ChainProfile] = profile_at,
    max_segment: int | None = None,
    **others: Any,
) -> BatchChoice:
    return choose_batch_size(
        profile,
        lambda problem: solve(replace(problem, max_segment=max_segment)),
        limit_bytes=limit_bytes,
        objective=objective,
        **others,
    )


def test_the_largest_batch_is_found_to_the_sample() -> None:
    # Recomputing all four takes 1000 + 3 inputs, and 10 for the block at work.
    found = choose(STATIC + 13 * 37, "batch_size", max_segment=1)
    assert found.best.batch_size == 37
    assert found.best.gradient_accumulation_steps == 1
    one_less = choose(STATIC + 13 * 37 - 1, "batch_size", max_segment=1)
    assert one_less.best.batch_size == 36


@pytest.mark.parametrize("missing", range(14))
def test_bounds_do_not_change_the_largest_batch(missing: int) -> None:
    limit_bytes = STATIC + 13 * 37 - missing
    plain, bounded = (
        choose(limit_bytes, "batch_size", bounds=bounds).best
        for bounds in (None, fastest_plan_bounds)
    )
    assert bounded.batch_size == plain.batch_size


def test_the_largest_batch_need_not_be_the_fastest() -> None:
    # 37 samples leave room for one kept block: 3 * 40 + 30 ns each, and 240 / 37 of the
    # optimizer step. 8 samples are all kept: 4 * 30 ns each, and 240 / 8.
    def choose_with(optimizer_ns: int, objective: Objective) -> BatchCandidate | None:
        return choose(
            STATIC + 13 * 37,
            objective,
            max_segment=1,
            profile=lambda size: profile_at(size, optimizer_ns=optimizer_ns),
        ).best

    fastest = choose_with(240, "throughput")
    assert (fastest.batch_size, fastest.ns_per_sample) == (8, 150)
    largest = choose_with(240, "batch_size")
    assert (largest.batch_size, largest.ns_per_sample) == (37, 150 + Fraction(240, 37))
    # Where the optimizer step is long, the largest batch is the fastest.
    assert choose_with(10**6, "throughput").batch_size == 37


def test_throughput_compares_small_sizes_and_multiples_of_eight() -> None:
    found = choose(STATIC + 13 * 37, max_segment=1)
    sizes = [each.batch_size for each in found.considered]
    assert sizes == sorted(sizes)
    assert {1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32} <= set(sizes)
    by_hand = min(
        (each for each in found.considered if each.ns_per_sample is not None),
        key=lambda each: each.ns_per_sample,
    )
    assert found.best == by_hand


def test_large_batches_are_compared_in_eight_steps_per_doubling() -> None:
    found = choose(STATIC + 13 * 300, max_segment=1)
    sizes = {each.batch_size for each in found.considered}
    assert {112, 120, 128, 144, 160, 240, 256, 288} <= sizes
    assert not {136, 272} & sizes


def test_the_sizes_that_are_compared_are_those_that_fit() -> None:
    for most in (0, 1, 3, 8, 9, 15, 16, 100, 4096, 4097, 5000, 2 * LARGEST_BATCH_SIZE):
        tried: list[int] = []

        def fits(size: int, most: int = most, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= most

        assert fitting_batch_sizes(fits) == batch_size_grid(
            min(most, LARGEST_BATCH_SIZE)
        )
        assert len(tried) <= most.bit_length() + 4


def test_a_small_model_is_not_held_at_65_536_samples() -> None:
    def fits(size: int) -> bool:
        return size <= 4_000_000

    assert largest_fitting_batch(fits) == 4_000_000
    assert fitting_batch_sizes(fits)[-1] > 4_000_000 * 8 // 9
    assert largest_fitting_batch(fits, largest=65_536) == 65_536


def test_time_per_sample_is_all_micro_batches_and_one_optimizer_step() -> None:
    # Everything fits: 4 * 30 per sample, 600 for the optimizer, over 8 samples.
    found = choose(10**6, effective_batch_size=8, batch_sizes=[2])
    assert found.best.gradient_accumulation_steps == 4
    assert found.best.ns_per_sample == Fraction(4 * (4 * 30 * 2) + 600, 8)
    assert found.best.peak_bytes == STATIC + 4 * 10 * 2
    assert found.best.solution.segments == ()


def test_only_divisors_of_the_effective_batch_are_tried() -> None:
    found = choose(10**6, effective_batch_size=12)
    assert [each.batch_size for each in found.considered] == [1, 2, 3, 4, 6, 12]
    steps = [each.gradient_accumulation_steps for each in found.considered]
    assert steps == [12, 6, 4, 3, 2, 1]


def test_divisors_end_at_the_first_that_does_not_fit_but_for_the_whole_batch() -> None:
    found = choose(STATIC + 13 * 3, "batch_size", effective_batch_size=12)
    assert [each.batch_size for each in found.considered] == [1, 2, 3, 4, 12]
    assert found.best.batch_size == 3


def test_the_whole_batch_may_fit_where_accumulating_smaller_ones_does_not() -> None:
    # Accumulated gradients are alive all the time (rule C3): 500 bytes here.
    def accumulating(batch_size: int) -> ChainProfile:
        chain = profile_at(batch_size)
        extra = 500 if batch_size < 4 else 0
        return replace(chain, static_bytes=chain.static_bytes + extra)

    found = choose(STATIC + 160, effective_batch_size=4, profile=accumulating)
    assert [each.batch_size for each in found.considered] == [1, 4]
    assert found.best.batch_size == 4
    assert found.best.gradient_accumulation_steps == 1


def test_a_launch_bound_model_prefers_the_larger_batch() -> None:
    found = choose(
        10**6,
        effective_batch_size=16,
        profile=lambda size: profile_at(size, overhead_ns=1000),
    )
    assert found.best.batch_size == 16


def test_of_equally_fast_batches_the_one_of_lower_peak_is_taken() -> None:
    found = choose(10**6, effective_batch_size=16)
    assert len({each.ns_per_sample for each in found.considered}) == 1
    assert found.best.batch_size == 1


def test_memory_takes_the_lowest_peak() -> None:
    found = choose(10**6, "memory", solve=lowest_peak)
    assert [each.batch_size for each in found.considered] == [1]
    assert found.best.peak_bytes == STATIC + 13
    divided = choose(10**6, "memory", solve=lowest_peak, effective_batch_size=6)
    assert divided.best.batch_size == 1
    assert divided.best.gradient_accumulation_steps == 6


def test_given_batch_sizes_are_the_only_ones_tried() -> None:
    found = choose(10**6, "batch_size", batch_sizes=[6])
    assert [each.batch_size for each in found.considered] == [6]
    assert found.best.gradient_accumulation_steps == 1


@pytest.mark.parametrize("objective", ["throughput", "batch_size", "memory"])
def test_where_nothing_fits_there_is_no_best_but_what_was_tried(
    objective: Objective,
) -> None:
    found = choose(STATIC, objective)
    assert found.best is None
    assert [each.batch_size for each in found.considered] == [1]
    assert found.considered[0].peak_bytes is None
    assert found.considered[0].ns_per_sample is None
    assert choose(STATIC, objective, effective_batch_size=4).best is None


def test_a_model_that_never_fills_the_card_ends_at_the_largest_batch_there_is() -> None:
    found = choose(10**12, "batch_size")
    assert found.best.batch_size == LARGEST_BATCH_SIZE
    assert len(found.considered) == 25  # 2**0 to 2**24


def test_a_larger_budget_is_never_slower_and_never_has_a_smaller_batch() -> None:
    before_size, before_time = 0, None
    for limit_bytes in range(STATIC + 13, STATIC + 600, 29):
        largest = choose(limit_bytes, "batch_size").best.batch_size
        assert largest >= before_size
        time = choose(limit_bytes, effective_batch_size=48).best.ns_per_sample
        assert before_time is None or time <= before_time
        before_size, before_time = largest, time


def test_each_batch_size_is_solved_once_with_its_own_chain_and_the_budget() -> None:
    asked = []

    def solve(problem: Problem) -> Solution:
        asked.append((problem.chain.batch_size, problem.limit_bytes))
        return Solution(segments=(), proven_optimal=False, explanation="")

    choose(777, solve=solve, effective_batch_size=8)
    assert asked == [(1, 777), (2, 777), (4, 777), (8, 777)]


@pytest.mark.parametrize("share", [Fraction(1), Fraction(9, 10), Fraction(11, 10)])
def test_what_is_not_below_a_time_is_not_solved(share: Fraction) -> None:
    solved: list[int] = []

    def solve(problem: Problem) -> Solution:
        solved.append(problem.chain.batch_size)
        return chain_dp(problem)

    fastest = choose(STATIC + 13 * 37, bounds=fastest_plan_bounds).best
    assert fastest is not None
    below_ns = fastest.ns_per_sample * share
    found = choose(
        STATIC + 13 * 37, solve=solve, bounds=fastest_plan_bounds, below_ns=below_ns
    )
    if share > 1:
        assert found.best == fastest
    else:
        assert found.best is None or found.best.ns_per_sample >= below_ns
        assert found.lower_ns  # some fit
        assert not any(
            found.lower_ns[size] > below_ns for size in solved if size in found.lower_ns
        )


def test_any_size_below_a_time_is_found_where_one_is_and_in_fewer_tries() -> None:
    limit_bytes = STATIC + 13 * 37
    best = choose(limit_bytes, bounds=fastest_plan_bounds).best
    assert best is not None
    early = 0
    for hundredths in (100, 101, 110, 130, 200):
        below_ns = best.ns_per_sample * hundredths / 100
        whole, any_one = (
            choose(
                limit_bytes,
                bounds=fastest_plan_bounds,
                below_ns=below_ns,
                any_below=any_below,
            )
            for any_below in (False, True)
        )
        assert (any_one.best is not None) == (whole.best is not None)
        if any_one.best is not None and hundredths > 100:
            assert any_one.best.ns_per_sample < below_ns
        early += any_one.best != whole.best
    assert early
