"""What every solver promises. A new one is a row in SOLVERS and inherits all of it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.chain_dp import chain_dp
from budgetfit.solvers.problem import Problem, Solution
from budgetfit.solvers.uniform_segments import fastest_uniform
from tests.solvers.chain_milp import chain_milp
from tests.solvers.chains import random_problem, rate_all, rate_solution, seeded
from tests.solvers.exhaustive import exhaustive

CHAINS = 60
Solve = Callable[[Problem], Solution]
SOLVERS: dict[str, Solve] = {
    "chain_dp": chain_dp,
    "chain_milp": chain_milp,
    "exhaustive": exhaustive,
    "uniform_segments": fastest_uniform,
}

pytestmark = pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)


def problems(seed: int, *, costly: bool = False) -> list[Problem]:
    rnd = seeded(seed)
    found = []
    for _ in range(CHAINS):
        others = rnd.choice([0, 0, 2])  # options besides keeping and recomputing
        length = rnd.randint(1, 6 - others)
        found.append(random_problem(rnd, length, costly=costly, most_others=others))
    return found


def test_a_plan_is_within_the_budget(solve: Solve) -> None:
    for problem in problems(1):
        found = solve(problem)
        if found.segments is not None:
            peak_bytes = chain_peak_bytes(problem.chain, found.segments)
            assert peak_bytes <= problem.limit_bytes


def test_a_plan_respects_the_longest_segment_allowed(solve: Solve) -> None:
    for problem in problems(2):
        longest = problem.max_segment or len(problem.chain.blocks)
        for segment in solve(problem).segments or ():
            assert len(segment.blocks) <= longest


def test_nothing_is_recomputed_when_everything_fits(solve: Solve) -> None:
    for problem in problems(3, costly=True):
        everything = chain_peak_bytes(problem.chain, ())
        assert solve(replace(problem, limit_bytes=everything)).segments == ()


def test_the_same_problem_gives_the_same_answer(solve: Solve) -> None:
    for first, second in zip(problems(4), problems(4), strict=True):
        assert solve(first) == solve(second)


def test_a_larger_budget_is_never_slower(solve: Solve) -> None:
    for problem in problems(5):
        before = None
        for limit_bytes in range(problem.limit_bytes, problem.limit_bytes + 30, 3):
            found = solve(replace(problem, limit_bytes=limit_bytes))
            if found.segments is None:
                assert before is None
                continue
            time_ns = chain_time_ns(problem.chain, found.segments)
            assert before is None or time_ns <= before
            before = time_ns


def test_a_budget_below_every_plan_has_no_answer(solve: Solve) -> None:
    for problem in problems(6):
        lowest = min(
            peak for _, peak, _ in rate_all(replace(problem, limit_bytes=10**9))
        )
        found = solve(replace(problem, limit_bytes=lowest - 1))
        assert found.segments is None
        assert found.explanation


def test_no_plan_is_faster_than_the_optimum_and_a_proven_one_is_it(
    solve: Solve,
) -> None:
    for problem in problems(7):
        best = rate_solution(problem, exhaustive(problem))
        solution = solve(problem)
        found = rate_solution(problem, solution)
        if solution.proven_optimal and best is not None:
            assert found is not None
            assert found[0] == best[0]
        elif solution.proven_optimal:
            assert found is None
        elif found is not None:
            assert found >= best


def test_no_plan_is_faster_than_the_least_time_and_a_proven_one_takes_it(
    solve: Solve,
) -> None:
    for problem in problems(9):
        solution = solve(problem)
        best = rate_solution(problem, exhaustive(problem))
        if best is not None and solution.lower_bound_ns is not None:
            assert solution.lower_bound_ns <= best[0]
        if solution.proven_optimal and best is not None:
            assert solution.lower_bound_ns == best[0]


def test_equal_blocks_in_another_order_take_the_same_time(solve: Solve) -> None:
    for problem in problems(8):
        blocks = (problem.chain.blocks[0],) * 5
        named = [replace(each, name=f"layers.{i}") for i, each in enumerate(blocks)]
        renamed = [replace(each, name=f"h.{9 - i}") for i, each in enumerate(blocks)]
        times = set()
        for chosen in (named, renamed):
            chain = replace(problem.chain, blocks=tuple(chosen))
            found = solve(Problem(chain=chain, limit_bytes=problem.limit_bytes))
            plan = found.segments
            times.add(None if plan is None else chain_time_ns(chain, plan))
        assert len(times) == 1
