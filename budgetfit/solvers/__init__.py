"""What to keep, recompute or offload: one file per solver, and their table.

A solver takes a ``Problem`` and returns a ``Solution``. A new one is a file here and a
row in ``SOLVERS``; it inherits the law suite of tests/solvers/test_laws.py. Open
``problem.py`` and ``chain_dp.py`` first.
"""

from collections.abc import Callable
from typing import Final

from budgetfit.solvers.chain_dp import chain_dp
from budgetfit.solvers.chain_milp import chain_milp
from budgetfit.solvers.exhaustive import exhaustive
from budgetfit.solvers.problem import Problem, Solution
from budgetfit.solvers.uniform_segments import fastest_uniform

Solve = Callable[[Problem], Solution]

SOLVERS: Final[dict[str, Solve]] = {
    "chain_dp": chain_dp,
    "chain_milp": chain_milp,
    "exhaustive": exhaustive,
    "uniform_segments": fastest_uniform,
}
