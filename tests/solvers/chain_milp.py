"""A mixed-integer linear program (MILP): the second reference solver of the tests.

One 0/1 variable for each step of a plan; the chosen ones form a path from the first
block to the end (flow conservation). Exactly one of them covers each block, so that the
memory constraint needs no big-M:

    sum of S over all steps that end before it + need of the step that covers it <= M

twice, for the backward pass and, with autocast's weight copies, for the forward. HiGHS
meets symmetry and time limits on deep chains.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.labels import (
    available_bytes,
    optimizer_need,
    segments_from_steps,
)
from budgetfit.solvers.problem import Problem, Solution, describe
from budgetfit.solvers.transitions import ChainStep, drop_dominated_steps
from tests.solvers.chains import chain_steps

Floats = NDArray[np.float64]

# Status codes of scipy.optimize.milp.
_OPTIMAL: Final = 0
_LIMIT: Final = 1
_INFEASIBLE: Final = 2
TIME_LIMIT_S: Final = 60.0
# HiGHS allows constraint violations of 1e-6, which is 80 KB of 80 GB. Then the budget
# is tightened by that and more, at most so often.
_TOLERANCE: Final = 2e-6
_ROUNDS: Final = 5
# A gap is a quotient of floats; times are whole.
_NO_GAP: Final = 1e-9


def chain_milp(problem: Problem, time_limit_s: float = TIME_LIMIT_S) -> Solution:
    """Return a fastest plan within the budget, found by HiGHS; ties are arbitrary.

    The result is checked against the chain formula.

    Args:
        problem: The chain, the budget and the segments allowed.
        time_limit_s: Stop after so many seconds with the best plan found.
    """
    if optimizer_need(problem) > available_bytes(problem):
        return _none(proven=True, why="the optimizer step alone is above the budget")
    steps = drop_dominated_steps(chain_steps(problem))
    arcs = [(start, step) for start, row in enumerate(steps) for step in row]
    room = available_bytes(problem)
    lower_ns: int | None = None
    for _ in range(_ROUNDS):
        result = _solve(problem, arcs, room, time_limit_s)
        if result.status == _INFEASIBLE:
            proven = room == available_bytes(problem)
            return _none(proven=proven, why="HiGHS finds the rows infeasible")
        if result.status not in {_OPTIMAL, _LIMIT} or result.x is None:
            return _none(proven=False, why=f"HiGHS: {result.message}")
        if lower_ns is None:  # holds for the whole budget
            lower_ns = _bound_ns(result)
        # Integral up to rounding errors: never compared with 1.
        chosen = [arcs[number][1] for number in np.flatnonzero(np.round(result.x))]
        plan = segments_from_steps(problem, chosen)
        above = chain_peak_bytes(problem.chain, plan) - problem.limit_bytes
        if above <= 0:
            plain_ns = chain_time_ns(problem.chain, ())
            return _checked(problem, plan, plain_ns + lower_ns, result.message)
        room -= above + math.ceil(room * _TOLERANCE)
    return _none(proven=False, why="what HiGHS finds is above it by rounding")


def _checked(
    problem: Problem, plan: tuple[Segment, ...], lower_bound_ns: int, message: str
) -> Solution:
    """Return a plan that fits, with HiGHS's bound on the time."""
    time_ns = chain_time_ns(problem.chain, plan)
    lower_bound_ns = min(time_ns, lower_bound_ns)
    return Solution(
        segments=plan,
        proven_optimal=time_ns == lower_bound_ns,
        explanation=f"{describe(problem.chain, plan)}; HiGHS: {message}",
        lower_bound_ns=lower_bound_ns,
    )


def _bound_ns(result: Any) -> int:
    """Return HiGHS's lower bound on the extra time, rounded up: times are integers."""
    bound = float(result.mip_dual_bound)
    return math.ceil(bound - _NO_GAP * max(1.0, abs(bound)))


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Redirect stdout of HiGHS, which is C++, to the null device."""
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
) -> Any:
    """Minimise the extra time with HiGHS within so many bytes above the static ones."""
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
    """Return the flow-conservation rows."""
    rows = np.zeros((count + 1, len(arcs)))
    for column, (start, step) in enumerate(arcs):
        rows[start, column] += 1
        rows[step.stop, column] -= 1
    return rows


def _alive(arcs: list[tuple[int, ChainStep]], count: int, *, forward: bool) -> Floats:
    """Return, for each block, the row of the live bytes while it runs."""
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
