"""Lazily evaluated alternatives of a plan.

They do not affect the plan and take longer than it. By the time they are read the model
may have been checkpointed, trained or moved. So a meta copy, made while planning, is
traced then.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.applying.meta_copy import copy_to_meta
from budgetfit.applying.pytree import map_tensors
from budgetfit.core.plan import LazyAlternatives
from budgetfit.errors import TraceError
from budgetfit.planning.alternatives.alternatives import remaining_alternatives
from budgetfit.traces.gc_freeze import freeze_gc
from budgetfit.traces.swap_modules import modules_in
from budgetfit.tracing.isolation.torch_state import neutral_torch_state

if TYPE_CHECKING:
    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Alternative, Estimate
    from budgetfit.planning.profiling.block_chain import BlockChain
    from budgetfit.planning.search.search import Request
    from budgetfit.workload.workload import Workload


def lazy_alternatives(
    block_chain: BlockChain,
    request: Request,
    budget: Budget,
    plan: Estimate,
    first: tuple[Alternative, ...],
) -> LazyAlternatives:
    """Return a plan's alternatives; all but ``first`` are evaluated on first access.

    Where the model cannot be copied to meta, all are evaluated at once.
    """

    @functools.cache  # shared by the plan and its changed copies
    @neutral_torch_state()
    @freeze_gc()
    def find() -> tuple[Alternative, ...]:
        block_chain.traces.tracer.progress("judging the alternatives")
        return (
            *first,
            *remaining_alternatives(block_chain, request, budget, plan, first),
        )

    kept = (
        None
        if block_chain.traces.tracer.real_values
        else meta_workload(block_chain.traces.workload)
    )
    if kept is None:
        find()
    else:
        block_chain.traces.tracer.workload = kept
    return LazyAlternatives(known=first, evaluate=find)


def meta_workload(workload: Workload) -> Workload | None:
    """Return the workload with a meta copy of its model and a copy of its batch.

    None if the model cannot be copied, or if the loss uses modules: they may belong to
    the model, or change as it does.
    """
    if modules_in(workload.loss):
        return None
    try:
        model = copy_to_meta(workload.model, keep_small_integers=True)
    except TraceError:
        return None
    # On the CPU: GPU memory is needed for training.
    batch = map_tensors(
        workload.batch, lambda x: x.clone() if x.is_meta else x.to("cpu", copy=True)
    )
    return replace(workload, model=model, batch=batch)
