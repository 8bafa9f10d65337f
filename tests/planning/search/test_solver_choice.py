from dataclasses import replace
from typing import Any

from budgetfit.memory.chain.peak import chain_time_ns
from budgetfit.planning.search.solver_choice import fastest_plan, fastest_plan_bounds
from budgetfit.solvers.batch_size import choose_batch_size
from tests.solvers.chains import random_problem, seeded


def test_what_is_known_of_the_fastest_plan_is_true() -> None:
    rnd = seeded(310)
    sure = ruled_out = 0
    for _ in range(400):
        problem = random_problem(rnd, rnd.randint(1, 4), most_others=2)
        problem = replace(problem, max_segment=None, nested=False)
        bounds, found = fastest_plan_bounds(problem), fastest_plan(problem)
        if found.segments is None:
            assert bounds.upper_ns is None
            ruled_out += bounds.lower_ns is None
            continue
        time_ns = chain_time_ns(problem.chain, found.segments)
        assert bounds.lower_ns is not None
        assert bounds.lower_ns <= time_ns
        # The simplest form may be a little slower than a plan with host memory.
        sure += bounds.upper_ns is not None
        assert bounds.upper_ns is None or time_ns <= bounds.upper_ns
    assert sure > 200
    assert ruled_out > 5


def test_bounds_spare_solving_and_change_no_choice() -> None:
    rnd = seeded(311)
    solved = spared = 0
    for _ in range(60):
        problem = random_problem(rnd, 4, most_others=1)
        base = problem.chain

        def profile_at(size: int, base: Any = base) -> Any:
            blocks = tuple(
                replace(
                    block,
                    output_bytes=block.output_bytes * size,
                    forward_ns=block.forward_ns * size + 7,
                    backward_ns=block.backward_ns * size,
                    options=tuple(
                        replace(
                            each,
                            saved_bytes=each.saved_bytes * size,
                            forward_bytes=each.forward_bytes * size,
                            backward_bytes=each.backward_bytes * size,
                            cached_bytes=each.cached_bytes * size,
                            extra_ns=each.extra_ns * size,
                        )
                        for each in block.options
                    ),
                )
                for block in base.blocks
            )
            return replace(base, batch_size=size, blocks=blocks)

        budget = base.static_bytes + 9 * (problem.limit_bytes - base.static_bytes)
        for objective in ("throughput", "batch_size"):
            for effective in (None, 24):
                plain, quick = (
                    choose_batch_size(
                        profile_at,
                        fastest_plan,
                        limit_bytes=budget,
                        objective=objective,
                        effective_batch_size=effective,
                        bounds=bounds,
                    )
                    for bounds in (None, fastest_plan_bounds)
                )
                assert quick.best == plain.best
                assert len(quick.considered) <= len(plain.considered)
                solved += len(plain.considered)
                spared += len(plain.considered) - len(quick.considered)
    assert spared > solved / 4
