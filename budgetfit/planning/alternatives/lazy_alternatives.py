"""The alternatives of a plan, worked out when somebody looks at them.

They decide nothing, and take longer than the answer. By the time they are asked for the
model may be another: checkpointed, trained, moved. So what is traced then is a copy
without weights, made while planning.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.applying.meta_copy import weightless_copy
from budgetfit.applying.pytree import map_tensors
from budgetfit.core.plan import LaterRows
from budgetfit.errors import TraceError
from budgetfit.planning.alternatives.alternatives import further_rows
from budgetfit.traces.gc_freeze import old_objects_left_alone
from budgetfit.traces.swap_modules import modules_in
from budgetfit.tracing.isolation.torch_state import undisturbed

if TYPE_CHECKING:
    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Alternative, Estimate
    from budgetfit.planning.profiling.block_chain import Chains
    from budgetfit.planning.search.search import Request
    from budgetfit.workload.workload import Subject


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

    kept = None if chains.traces.real_values else kept_subject(chains.traces.subject)
    if kept is None:
        find()
    else:
        chains.traces.go_on_with(kept)
    return LaterRows(first=first, find=find)


def kept_subject(subject: Subject) -> Subject | None:
    """Return the subject with a copy of its model without weights, and of its batch.

    None if the model cannot be copied, or if the loss runs modules: they may be parts
    of the model, or change as it does.
    """
    if modules_in(subject.loss):
        return None
    try:
        model = weightless_copy(subject.model, small_values=True)
    except TraceError:
        return None
    # On the CPU: what is on the card is the training's.
    batch = map_tensors(
        subject.batch, lambda x: x.clone() if x.is_meta else x.to("cpu", copy=True)
    )
    return replace(subject, model=model, batch=batch)
