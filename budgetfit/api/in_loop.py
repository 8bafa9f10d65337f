"""A plan's prediction in the training loop of another library, for exports."""

import warnings
from collections.abc import Callable
from dataclasses import replace

from budgetfit.api.check_plan import at_least_planned
from budgetfit.core.budget import Budget
from budgetfit.core.loop import RUN, Loop, LoopKind
from budgetfit.core.plan import Estimate, Plan
from budgetfit.core.recipe import Recipe
from budgetfit.errors import BudgetfitError, InputError
from budgetfit.inputs.arguments import ParsedArguments
from budgetfit.inputs.plan_source import names_its_model, planned_arguments
from budgetfit.inputs.planned_again import parse_again
from budgetfit.planning.planner import make_estimate
from budgetfit.traces.loops.library import check_installed
from budgetfit.traces.loops.prepare import refuse_recipe
from budgetfit.tracing.isolation.torch_state import neutral_torch_state


@neutral_torch_state()
def plan_in_loop(
    plan: Plan, kind: LoopKind, progress: Callable[[str], None] | None = None
) -> Plan:
    """Return a plan with the memory that its recipe takes in another loop.

    As it is, where that cannot be found out: the library is not installed, the saved
    plan does not say which model it is for, or the loop cannot train so by itself. A
    plan for several GPUs is that of ``Run``: loops are traced on one, with whole
    weights. Where ``Run`` takes the longest batch first, no loop does: their segments
    expand.

    Where the model or its batch cannot be made again, or the loop not be traced, the
    plan is as it is and a warning says why.
    """
    loop = RUN if plan.recipe.parallelism is not None else Loop(kind=kind)
    same = loop == RUN and not plan.recipe.longest_batch_first
    if same or not names_its_model(plan):
        return plan
    try:
        check_installed(loop)
        refuse_recipe(plan.recipe, loop)
    except InputError:
        return plan
    try:
        asked = parse_again(plan, planned_arguments(plan), progress=progress)
    except (BudgetfitError, OSError) as error:
        return _as_it_is(plan, loop, error)
    try:
        refuse_recipe(plan.recipe, loop, asked.workload.loss)
    except InputError:
        return plan
    try:
        found = _estimate(plan, asked, loop)
    except BudgetfitError as error:
        return _as_it_is(plan, loop, error)
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


def _estimate(plan: Plan, asked: ParsedArguments, loop: Loop) -> Estimate:
    recipe, budget = _without_longest_first(plan)
    # The plan's is the share of one rank, of which another share would be taken.
    budget = replace(budget, host_ram_bytes=asked.budget.host_ram_bytes)
    workload = replace(asked.workload, gpu=plan.gpu)
    found = make_estimate(
        workload,
        recipe,
        budget,
        context_bytes=budget.context_bytes,
        progress=asked.given.progress,
        loop=loop,
    )
    return at_least_planned(plan, found, workload)


def _without_longest_first(plan: Plan) -> tuple[Recipe, Budget]:
    """Return the recipe and the budget in a loop other than ``Run``."""
    # No other takes the longest batch first: exports name expandable segments instead.
    recipe, budget = plan.recipe, plan.budget
    if recipe.longest_batch_first:
        recipe = replace(recipe, longest_batch_first=False)
        expandable = budget.allocator.with_expandable_segments()
        budget = replace(budget, allocator=expandable)
    return recipe, budget


def _as_it_is(plan: Plan, loop: Loop, error: Exception) -> Plan:
    """Return the plan, and warn why the loop's memory is not known."""
    warnings.warn(
        f"The memory is that of budgetfit.Run: what it is in {loop.describe()} could "
        f"not be found out. {error}",
        stacklevel=3,
    )
    return plan
