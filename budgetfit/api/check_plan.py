"""``check``: whether a saved plan still fits, with the libraries and card of today."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from budgetfit.api.estimate import estimate_recipe
from budgetfit.core.precision import requested_precisions
from budgetfit.inputs.arguments import Arguments
from budgetfit.inputs.plan_source import (
    check_batch_shapes,
    check_plan,
    planned_arguments,
)
from budgetfit.tracing.isolation.torch_state import neutral_torch_state
from budgetfit.workload.model_check import check_same_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from budgetfit.core.plan import Estimate, Plan


@neutral_torch_state()
def check(  # noqa: PLR0913 - what a saved plan may be checked with
    plan: Plan,
    model: nn.Module | str | None = None,
    *,
    gpu: str | None = None,
    vram: int | str | None = None,
    headroom: int | str | None = None,
    batch: Any = None,  # noqa: ANN401
    loss: Any = None,  # noqa: ANN401
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Estimate:
    """Predict a plan's memory again: does it still fit?

    The recipe is traced with the installed torch and transformers and the model's
    config as it is now. No decision is taken, and no GPU is needed.

    Args:
        plan: From ``plan()``, or loaded from disk.
        model: Needed where the plan has none; a loaded one knows a hub id or config.
        gpu: Another card; the planned one if neither this nor ``vram`` is given.
        vram: Another limit.
        headroom: As for ``plan``; of the planned card, what was planned.
        batch: Needed where the plan was made with one and loaded.
        loss: Likewise; ``file.py:function`` names one.
        trust_remote_code: Let a hub model's own code run.
        progress: Called with a line of text for each longer piece of work.

    Returns:
        The estimate, at the longest planned samples; ``fits`` is the answer.

    Raises:
        InputError: The model, batch or loss is not known, or the card cannot run it.
        TraceError: The model cannot run on fake tensors.
    """
    check_plan(plan)
    asked = planned_arguments(plan, model, batch=batch, loss=loss)
    if gpu is None and vram is None:
        budget = plan.budget
        known = plan.gpu.total_source != "given"
        gpu, vram = (plan.gpu.name if known else None), budget.total_bytes
        headroom = budget.headroom_bytes if headroom is None else headroom
    several = plan.recipe.parallelism
    parsed = Arguments(
        **asked,
        gpu=gpu,
        vram=vram,
        headroom=headroom,
        allocator=plan.budget.allocator.text or None,
        link=plan.gpu.interconnect or None,
        trust_remote_code=trust_remote_code,
        progress=progress,
    ).parsed([plan.recipe.precision], 0 if several is None else several.nodes)
    requested_precisions(plan.recipe.precision, parsed.target.gpu)
    check_same_model(plan, parsed.workload.model)
    check_batch_shapes(plan, parsed.workload.batch, parsed.workload.batch_dims)
    return estimate_recipe(parsed, plan.recipe)
