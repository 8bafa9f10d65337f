from dataclasses import replace

from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.chain_dp import pareto_front
from budgetfit.solvers.lagrangian_bounds import INFEASIBLE_NS, lagrangian_bounds
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.transitions import drop_dominated_steps, worthwhile_steps
from tests.solvers.chains import (
    chain_of,
    chain_steps,
    equal_blocks,
    option,
    random_problem,
    rate_solution,
    seeded,
)
from tests.solvers.exhaustive import exhaustive


def test_bounds_hold_at_every_budget_for_the_same_chain() -> None:
    # Paths that were found for one budget serve the next one.
    rnd = seeded(171)
    for _ in range(40):
        problem = random_problem(rnd, rnd.randint(2, 5), costly=True)
        highest = chain_peak_bytes(problem.chain, ())
        for limit_bytes in range(highest, highest // 3, -max(1, highest // 17)):
            asked = replace(problem, limit_bytes=limit_bytes)
            best = rate_solution(asked, exhaustive(asked))
            bounds = lagrangian_bounds(asked)
            if best is None:
                assert bounds.upper_ns == INFEASIBLE_NS
            else:
                extra_ns = best[0] - chain_time_ns(asked.chain, ())
                assert bounds.lower_ns <= extra_ns <= bounds.upper_ns


def test_equal_blocks_are_bounded_to_about_one_of_them() -> None:
    keep = option("keep", saved=17, forward=18, backward=2)
    again = option("recompute", saved=1, forward=10, backward=18, extra=10)
    chain = chain_of(*equal_blocks(40, keep, again))
    for limit_bytes in range(80, 700, 31):
        bounds = lagrangian_bounds(
            Problem(chain=chain, limit_bytes=limit_bytes, max_segment=1)
        )
        assert 0 <= bounds.upper_ns - bounds.lower_ns <= 2 * 10


def test_the_front_of_faster_plans_is_the_faster_part_of_the_whole_front() -> None:
    rnd = seeded(173)
    for _ in range(60):
        problem = random_problem(rnd, rnd.randint(2, 5), costly=True)
        whole = pareto_front(problem)
        for solution in whole:
            limit_ns = chain_time_ns(problem.chain, solution.segments)
            part = pareto_front(problem, faster_than_ns=limit_ns)
            assert [each.segments for each in part] == [
                each.segments
                for each in whole
                if chain_time_ns(problem.chain, each.segments) < limit_ns
            ]


def test_steps_of_equal_neighbourhoods_are_those_made_one_by_one() -> None:
    rnd = seeded(174)
    for _ in range(60):
        problem = random_problem(rnd, 3, most_others=2)
        one, two, three = problem.chain.blocks
        blocks = [one, two, two, two, two, three, two, two, one]
        named = tuple(
            replace(each, name=f"layers.{at}", gradient_bytes=rnd.choice([0, 5]))
            for at, each in enumerate(blocks)
        )
        asked = replace(
            problem,
            chain=replace(problem.chain, blocks=named),
            max_segment=rnd.choice([1, 2, 3, None]),
        )
        assert list(worthwhile_steps(asked)) == drop_dominated_steps(chain_steps(asked))
