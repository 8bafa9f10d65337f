"""A plan's prediction in the training loop of another library, for exports."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from budgetfit.core.loop import Loop
from budgetfit.errors import BudgetfitError
from budgetfit.inputs.plan_source import (
    loss_and_optimizer,
    planned_batch,
    planned_batch_dims,
)
from budgetfit.integrations.source_code.plain_torch import planned_model
from budgetfit.planning.planner import make_estimate
from budgetfit.traces.loops.library import check_installed
from budgetfit.tracing.isolation.torch_state import neutral_torch_state
from budgetfit.workload.model_check import check_same_model
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from budgetfit.core.loop import LoopKind
    from budgetfit.core.plan import Estimate, Plan


@neutral_torch_state()
def plan_in_loop(
    plan: Plan, kind: LoopKind, progress: Callable[[str], None] | None = None
) -> Plan:
    """Return a plan with the memory that its recipe takes in another loop.

    As it is, where that cannot be found out: the library is not installed, the saved
    plan does not say which model it is for, or the loop cannot train so by itself. A
    plan for several GPUs is as it is, too: loops are traced on one, with whole weights.
    """
    if plan.recipe.parallelism is not None:
        return plan
    try:
        found = _estimate(plan, Loop(kind=kind), progress)
    except (BudgetfitError, OSError):
        return plan
    memory = {
        name: getattr(found, name)
        for name in (
            "allocated_bytes",
            "reserved_bytes",
            "process_bytes",
            "process_range_bytes",
            "phase_peaks_bytes",
            "at_peak_bytes",
            "timeline",
            "fits",
            "loop",
        )
    }
    return plan.changed(estimate=replace(plan.estimate, **memory))


def _estimate(
    plan: Plan, loop: Loop, progress: Callable[[str], None] | None
) -> Estimate:
    check_installed(loop)
    model: Any = planned_model(plan)
    check_same_model(plan, model)
    dims = planned_batch_dims(plan, model)
    loss, optimizer = loss_and_optimizer(plan, None, None)
    workload = Workload(
        model=model,
        batch=planned_batch(plan, model, dims),
        batch_dims=dims,
        loss=loss,
        optimizer=optimizer,
        gpu=plan.gpu,
    ).with_found_blocks()
    return make_estimate(
        workload,
        plan.recipe,
        plan.budget,
        context_bytes=plan.budget.context_bytes,
        progress=progress,
        loop=loop,
    )
