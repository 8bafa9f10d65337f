"""An integer program: the second exact solver, independent, for small chains (S3).

One 0/1 variable for each step that a plan can be cut into; the chosen ones lead from
the first block to the end, one after the other (flow conservation). A block is covered
by exactly one of them, so that what is alive while it runs needs no big constant:

    sum of S over all steps that end before it + need of the step that covers it <= M

twice, for the backward pass and, with autocast's copies of weights, for the forward
(solver-facts 4.4). HiGHS meets symmetry and time limits on deep chains, so that the
labels of ``chain_dp`` are what plans are made with.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.labels import available_bytes, optimizer_need, segments_of
from budgetfit.solvers.problem import Problem, Solution, describe
from budgetfit.solvers.transitions import ChainStep, chain_steps, worthwhile

Floats = NDArray[np.float64]

# What HiGHS calls its outcomes (scipy.optimize.milp).
_OPTIMAL: Final = 0
_LIMIT: Final = 1
_INFEASIBLE: Final = 2
TIME_LIMIT_S: Final = 60.0
# HiGHS lets a row be violated by one part in a million, which is 80 KB of 80 GB. After
# a plan that does, the budget is tightened by that and more, so often.
_TOLERANCE: Final = 2e-6
_ROUNDS: Final = 5
# A gap is a quotient of floats; times are whole.
_NO_GAP: Final = 1e-9


def chain_milp(problem: Problem, time_limit_s: float = TIME_LIMIT_S) -> Solution:
    """Return a fastest plan within the budget, as HiGHS finds it; ties as they come.

    Whatever it claims is checked against the chain formula.

    Args:
        problem: The chain, the budget and the segments allowed.
        time_limit_s: Stop after so many seconds, with what there is by then.
    """
    if optimizer_need(problem) > available_bytes(problem):
        return _none(proven=True, why="the optimizer step alone is above the budget")
    steps = worthwhile(chain_steps(problem))
    arcs = [(start, step) for start, row in enumerate(steps) for step in row]
    room = available_bytes(problem)
    least_ns: int | None = None
    for _ in range(_ROUNDS):
        result = _solve(problem, arcs, room, time_limit_s)
        if result.status == _INFEASIBLE:
            proven = room == available_bytes(problem)
            return _none(proven=proven, why="HiGHS finds the rows infeasible")
        if result.status not in {_OPTIMAL, _LIMIT} or result.x is None:
            return _none(proven=False, why=f"HiGHS: {result.message}")
        if least_ns is None:  # holds for the whole budget
            least_ns = _bound_ns(result)
        # Whole but for a rounding error: never compared with 1 (facts 2.2).
        chosen = [arcs[number][1] for number in np.flatnonzero(np.round(result.x))]
        plan = segments_of(problem, chosen)
        above = chain_peak_bytes(problem.chain, plan) - problem.budget_bytes
        if above <= 0:
            plain_ns = chain_time_ns(problem.chain, ())
            return _checked(problem, plan, plain_ns + least_ns, result.message)
        room -= above + math.ceil(room * _TOLERANCE)
    return _none(proven=False, why="what HiGHS finds is above it by rounding")


def _checked(
    problem: Problem, plan: tuple[Segment, ...], least_time_ns: int, message: str
) -> Solution:
    """Return a plan that was found to fit, with what HiGHS proved of its time."""
    time_ns = chain_time_ns(problem.chain, plan)
    least_time_ns = min(time_ns, least_time_ns)
    return Solution(
        segments=plan,
        proven_optimal=time_ns == least_time_ns,
        explanation=f"{describe(problem.chain, plan)}; HiGHS: {message}",
        least_time_ns=least_time_ns,
    )


def _bound_ns(result: Any) -> int:  # noqa: ANN401 - scipy has no types
    """Return the least extra time that HiGHS leaves possible: times are whole."""
    bound = float(result.mip_dual_bound)
    return math.ceil(bound - _NO_GAP * max(1.0, abs(bound)))


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Keep HiGHS, which is not Python, from writing to the user's output."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _solve(
    problem: Problem, arcs: list[tuple[int, ChainStep]], room: int, time_limit_s: float
) -> Any:  # noqa: ANN401
    """Let HiGHS minimise the extra time within so many bytes above the static ones."""
    # Here and not above: importing it takes as long as solving a few chains.
    # It has no types.
    from scipy.optimize import (  # type: ignore[import-untyped]  # noqa: PLC0415
        Bounds,
        LinearConstraint,
        milp,
    )
    from scipy.sparse import csr_array  # type: ignore[import-untyped]  # noqa: PLC0415

    count = len(problem.chain.blocks)
    alive = np.concatenate(
        [_alive(arcs, count, forward=False), _alive(arcs, count, forward=True)]
    )
    scale = 1 / max(1, abs(room))
    ends = np.zeros(count + 1)
    ends[0], ends[-1] = 1, -1
    with _nothing_printed():
        return milp(
            np.array([step.extra_ns for _, step in arcs], np.float64),
            integrality=np.ones(len(arcs)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(csr_array(_flow(arcs, count)), ends, ends),
                LinearConstraint(csr_array(alive * scale), -np.inf, room * scale),
            ],
            options={"disp": False, "mip_rel_gap": 0, "time_limit": time_limit_s},
        )


def _flow(arcs: list[tuple[int, ChainStep]], count: int) -> Floats:
    """Return the rows that let every block be entered as often as it is left."""
    rows = np.zeros((count + 1, len(arcs)))
    for column, (start, step) in enumerate(arcs):
        rows[start, column] += 1
        rows[step.stop, column] -= 1
    return rows


def _alive(arcs: list[tuple[int, ChainStep]], count: int, *, forward: bool) -> Floats:
    """Return, for each block, the row of the bytes alive while it runs."""
    rows = np.zeros((count, len(arcs)))
    for column, (start, step) in enumerate(arcs):
        need = step.forward_bytes if forward else step.backward_bytes
        left = step.saved_bytes + (step.cached_bytes if forward else 0)
        rows[start : step.stop, column] = need
        rows[step.stop :, column] = left
    return rows


def _none(*, proven: bool, why: str) -> Solution:
    return Solution(
        segments=None,
        proven_optimal=proven,
        explanation=f"No plan within the budget; {why}.",
    )
