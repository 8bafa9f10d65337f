from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from budgetfit.core.block_profile import ChainProfile
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.chain_dp import chain_dp
from budgetfit.solvers.discretized_bounds import discretized_bounds
from budgetfit.solvers.lagrangian_bounds import INFEASIBLE_NS, lagrangian_bounds
from budgetfit.solvers.problem import Problem
from tests.solvers.chain_milp import chain_milp
from tests.solvers.chains import (
    assert_reaches,
    block,
    chain_of,
    chain_steps,
    equal_blocks,
    freeing,
    option,
    random_problem,
    rate_solution,
    seeded,
)
from tests.solvers.exhaustive import exhaustive

MB = 10**6


def heterogeneous(count: int) -> ChainProfile:
    """The chain of solver-facts section 8, with exact whole numbers."""
    rnd = seeded(11)

    def vary(value: float) -> int:
        return int(value * (1 + 0.3 * rnd.random()))

    inputs = [vary(MB) for _ in range(count + 1)]
    blocks = []
    for number in range(count):
        saved, forward_ns = vary(17 * MB), vary(10 * MB)
        before, after = inputs[number : number + 2]
        gradient = int(2 * MB * rnd.random())
        less = int(0.6 * saved)
        blocks.append(
            replace(
                block(
                    f"layers.{number}",
                    option("keep", saved, saved + after, gradient),
                    option(
                        "recompute",
                        before,
                        before + after,
                        saved + gradient,
                        extra=forward_ns,
                    ),
                    option(
                        "selective",
                        less,
                        less + after,
                        saved - less + gradient,
                        extra=int(0.06 * forward_ns),
                        saved_ops=("aten.mm.default:0",),
                    ),
                    gradient=gradient,
                    output=after,
                ),
                forward_ns=forward_ns,
                backward_ns=2 * forward_ns,
            )
        )
    return chain_of(*blocks, input_bytes=inputs[0])


def test_the_optimum_lies_between_the_bounds_and_the_upper_one_has_a_plan() -> None:
    rnd = seeded(170)
    found, close = Counter[int](), Counter[int]()  # by slots of the grid; 0: Lagrangian
    ruled_out = 0
    for _ in range(400):
        others = rnd.choice([0, 2])
        problem = random_problem(rnd, rnd.randint(1, 5 - others), most_others=others)
        steps = chain_steps(problem)
        best = rate_solution(problem, exhaustive(problem))
        plain_ns = chain_time_ns(problem.chain, ())
        by_multipliers = lagrangian_bounds(problem)
        ruled_out += by_multipliers.lower_ns == INFEASIBLE_NS
        rows: dict[int, tuple[Any, Any]] = {0: (by_multipliers, by_multipliers.plan)}
        for slots in (1, 3, 10, 1000):
            on_grid = discretized_bounds(problem, steps, slots)
            rows[slots] = (on_grid, on_grid.steps)
        for slots, (bounds, plan) in rows.items():
            if best is None:
                assert bounds.upper_ns == INFEASIBLE_NS
                assert plan == ()
                continue
            assert bounds.lower_ns <= best[0] - plain_ns <= bounds.upper_ns
            if bounds.upper_ns < INFEASIBLE_NS:
                assert_reaches(problem, plan, bounds.upper_ns)
                found[slots] += 1
                close[slots] += bounds.upper_ns - bounds.lower_ns <= (slots == 0) * 2
    assert found[0] > 200
    assert close[0] > 100
    assert ruled_out > 10
    assert 100 < close.total() - close[0] < found.total() - found[0]


def test_blocks_that_free_more_than_they_save_are_bounded_too() -> None:
    rnd = seeded(71)
    for _ in range(150):
        problem = random_problem(rnd, rnd.randint(2, 5))
        problem = freeing(rnd, problem)
        best = rate_solution(problem, exhaustive(problem))
        if best is None:
            continue
        assert rate_solution(problem, chain_dp(problem)) == best
        extra_ns = best[0] - chain_time_ns(problem.chain, ())
        steps = chain_steps(problem)
        on_grids = [discretized_bounds(problem, steps, slots) for slots in (2, 7, 100)]
        for bounds in (lagrangian_bounds(problem), *on_grids):
            assert bounds.lower_ns <= extra_ns <= bounds.upper_ns


def test_labels_between_bounds_find_what_trying_everything_finds() -> None:
    # With no label allowed before the bounds are asked; ties as exactly as without.
    rnd = seeded(72)
    for grids in ((4, 8), (64,), (2**14,)):
        for _ in range(80):
            others = rnd.choice([0, 2])
            problem = random_problem(
                rnd, rnd.randint(1, 6 - others), most_others=others
            )
            best = rate_solution(problem, exhaustive(problem))
            found = chain_dp(problem, few_labels=0, grids=grids)
            assert found.proven_optimal
            assert rate_solution(problem, found) == best


@pytest.mark.parametrize("max_labels", [0, 1, 2])
def test_a_certificate_is_never_violated(max_labels: int) -> None:
    rnd = seeded(73)
    certified = 0
    for _ in range(120):
        others = rnd.choice([0, 2])
        problem = random_problem(rnd, rnd.randint(2, 5 - others), most_others=others)
        best = rate_solution(problem, exhaustive(problem))
        found = chain_dp(problem, max_labels, grids=(5, 10))
        rated = rate_solution(problem, found)
        if best is None:
            assert rated is None
            continue
        assert found.lower_bound_ns <= best[0] <= rated[0]
        assert rated[1] <= problem.limit_bytes
        if found.proven_optimal:
            assert rated[0] == best[0]
        elif rated[0] > found.lower_bound_ns:
            certified += 1
            assert "% of its time (bounds on a grid)" in found.explanation
    assert certified


@pytest.mark.parametrize("share", [0.12, 0.3, 0.5])
@pytest.mark.parametrize("count", [24, 48, 80, 126])
def test_chains_of_blocks_that_all_differ_are_certified_to_a_thousandth(
    count: int, share: float
) -> None:
    chain = heterogeneous(count)
    limit_bytes = int(
        share * sum(o.keep.saved_bytes + o.gradient_bytes for o in chain.blocks)
    )
    problem = Problem(chain=chain, limit_bytes=limit_bytes, max_segment=6)
    found = chain_dp(problem)
    time_ns = chain_time_ns(chain, found.segments)
    assert chain_peak_bytes(chain, found.segments) <= limit_bytes
    assert found.lower_bound_ns <= time_ns <= found.lower_bound_ns * 1.001
    rough = chain_dp(problem, max_labels=5)
    rough_ns = chain_time_ns(chain, rough.segments)
    assert rough.lower_bound_ns <= time_ns <= rough_ns <= rough.lower_bound_ns * 1.001


@pytest.mark.parametrize("share", [0.2, 0.4])
def test_highs_agrees_on_twelve_blocks_that_all_differ(share: float) -> None:
    chain = heterogeneous(12)
    limit_bytes = int(share * chain_peak_bytes(chain, ()))
    problem = Problem(chain=chain, limit_bytes=limit_bytes, max_segment=4)
    found, other = chain_dp(problem), chain_milp(problem)
    assert found.proven_optimal
    assert other.proven_optimal
    assert found.lower_bound_ns == other.lower_bound_ns


def test_an_optimizer_step_above_the_budget_leaves_no_plan() -> None:
    keep = option("keep", saved=2, forward=3, backward=1)
    chain = chain_of(*equal_blocks(3, keep), optimizer=50)
    problem = Problem(chain=chain, limit_bytes=40)
    assert (
        discretized_bounds(problem, chain_steps(problem), 16).lower_ns == INFEASIBLE_NS
    )
