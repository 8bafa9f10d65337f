"""The alternatives of a plan, worked out when somebody looks at them.

They decide nothing, and take longer than the answer. By the time they are asked for the
model may be another: checkpointed, trained, moved. So what is traced then is a copy
without weights, made while planning.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from budgetfit.core.plan import LaterRows
from budgetfit.planning.garbage import old_objects_left_alone
from budgetfit.planning.what_if import further_rows
from budgetfit.tracing.undisturbed import undisturbed

if TYPE_CHECKING:
    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Alternative, Estimate
    from budgetfit.planning.chains import Chains
    from budgetfit.planning.search import Request


def later_rows(
    chains: Chains,
    request: Request,
    budget: Budget,
    plan: Estimate,
    first: tuple[Alternative, ...],
) -> LaterRows:
    """Return the rows of a plan's table, all but ``first`` still to be worked out.

    Where the model cannot be kept as it is now, all are worked out at once.
    """

    @functools.cache  # a plan and its changed copies share them
    @undisturbed()
    @old_objects_left_alone()
    def find() -> tuple[Alternative, ...]:
        chains.traces.progress("judging the alternatives")
        return (*first, *further_rows(chains, request, budget, plan, first))

    if not chains.traces.keep_the_model():
        find()
    return LaterRows(first=first, find=find)
