import os
import sys
from dataclasses import replace
from itertools import product

import pytest
from scipy.optimize import milp

from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.chain_dp import chain_dp
from budgetfit.solvers.problem import Problem
from tests.solvers.chain_milp import chain_milp
from tests.solvers.chains import (
    block,
    chain_of,
    equal_blocks,
    option,
    random_problem,
    rate_solution,
    seeded,
)
from tests.solvers.exhaustive import exhaustive

KEEP = option("keep", saved=20, forward=24, backward=4)
RECOMPUTE = option("recompute", saved=1, forward=16, backward=23, extra=1)


@pytest.mark.parametrize("seed", range(4))
def test_trying_everything_labels_and_the_integer_program_agree(seed: int) -> None:
    # 4 x 110 chains of every option; also the peak and wrapped blocks of the labels.
    rnd = seeded(200 + seed)
    infeasible = 0
    for _ in range(110):
        others = rnd.choice([0, 1, 3])
        problem = random_problem(rnd, rnd.randint(1, 6 - others), most_others=others)
        best = rate_solution(problem, exhaustive(problem))
        assert rate_solution(problem, chain_dp(problem)) == best
        found = chain_milp(problem)
        rated = rate_solution(problem, found)
        assert found.proven_optimal
        assert (rated and rated[0]) == (best and best[0])
        infeasible += best is None
    assert 1 <= infeasible <= 60


def test_they_agree_on_all_nested_segmentations_of_eight_blocks() -> None:
    rnd = seeded(210)
    for length in (7, 8):
        problem = random_problem(rnd, length)
        problem = replace(problem, max_segment=4 if length == 8 else None, nested=True)
        best = rate_solution(problem, exhaustive(problem))
        assert rate_solution(problem, chain_dp(problem)) == best
        rated = rate_solution(problem, chain_milp(problem))
        assert (rated and rated[0]) == (best and best[0])


def test_what_highs_prints_does_not_reach_the_users_output(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def talkative(*args: object, **kwargs: object) -> object:
        os.write(1, b"a line of its own")  # not through Python's own output
        return milp(*args, **kwargs)

    monkeypatch.setattr("scipy.optimize.milp", talkative)
    chain = chain_of(*equal_blocks(6, KEEP, RECOMPUTE, gradient=3))
    sys.stdout.write("before, ")
    assert chain_milp(Problem(chain=chain, limit_bytes=60)).segments is not None
    sys.stdout.write("and after")
    sys.stdout.flush()
    assert capfd.readouterr() == ("before, and after", "")


def test_no_chosen_item_is_lost_to_a_float_that_is_almost_one() -> None:
    # A peer compares variables with 1 and loses those that come out as
    # 1.0000000000000002: 3 of 300 such items, and 15 of 40 with 50 of them (facts 2.2).
    rnd = seeded(1)
    for _ in range(40):
        count = rnd.randint(3, 8)
        sizes = [int(rnd.random() / count * 2 * 10**6) for _ in range(count)]
        times = [int(rnd.random() * 10**6) + 1 for _ in range(count)]
        blocks = [
            block(
                f"layers.{n}",
                option("keep", saved=size, forward=size, backward=0),
                option("recompute", saved=0, forward=0, backward=0, extra=time),
                output=0,
            )
            for n, (size, time) in enumerate(zip(sizes, times, strict=True))
        ]
        chain = chain_of(*blocks, input_bytes=0)
        problem = Problem(
            chain=chain, limit_bytes=int(rnd.random() * 10**6), max_segment=1
        )
        most = max(
            sum(time for time, kept in zip(times, chosen, strict=True) if kept)
            for chosen in product([0, 1], repeat=count)
            if sum(size for size, kept in zip(sizes, chosen, strict=True) if kept)
            <= problem.limit_bytes
        )
        for solve in (chain_dp, chain_milp):
            found = solve(problem)
            extra_ns = chain_time_ns(chain, found.segments) - chain_time_ns(chain, ())
            assert extra_ns == sum(times) - most


def test_a_byte_over_the_budget_is_noticed_below_the_tolerance_of_floats() -> None:
    size = 10**10 + 1
    keep = option("keep", saved=size, forward=size, backward=0)
    recompute = option("recompute", saved=0, forward=0, backward=size, extra=1)
    chain = chain_of(*equal_blocks(3, keep, recompute, output=0), input_bytes=0)
    problem = Problem(chain=chain, limit_bytes=2 * size - 1, max_segment=1)
    found = chain_milp(problem)
    assert len(found.segments) == 2
    assert chain_peak_bytes(chain, found.segments) <= problem.limit_bytes
    assert found.lower_bound_ns <= chain_time_ns(chain, found.segments)


def test_without_time_there_is_no_proof() -> None:
    chain = chain_of(*equal_blocks(12, KEEP, RECOMPUTE, gradient=3))
    problem = Problem(chain=chain, limit_bytes=60)
    found = chain_milp(problem, time_limit_s=0.0)
    assert not found.proven_optimal
    assert "ime limit" in found.explanation


def test_it_says_why_there_is_no_plan() -> None:
    chain = chain_of(*equal_blocks(2, KEEP, RECOMPUTE), static=100, optimizer=50)
    early = chain_milp(Problem(chain=chain, limit_bytes=149))
    assert early.proven_optimal
    assert "the optimizer step alone" in early.explanation
    rows = chain_milp(Problem(chain=replace(chain, optimizer_bytes=0), limit_bytes=110))
    assert rows.proven_optimal
    assert "infeasible" in rows.explanation
