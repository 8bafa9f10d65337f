"""``check``: whether a saved plan still fits, with the libraries and card of today."""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from budgetfit.api.estimate import estimate_recipe
from budgetfit.core.plan import Estimate, Plan
from budgetfit.core.precision import requested_precisions
from budgetfit.errors import InputError
from budgetfit.inputs.plan_source import Loss, Optimizer, check_plan, planned_arguments
from budgetfit.inputs.planned_again import parse_again
from budgetfit.planning.search.varying_lengths import with_lengths
from budgetfit.tracing.isolation.torch_state import neutral_torch_state
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.workload.workload import Workload


@neutral_torch_state()
def check(  # noqa: PLR0913 - what a saved plan may be checked with
    plan: Plan,
    model: nn.Module | str | None = None,
    *,
    gpu: str | None = None,
    vram: int | str | None = None,
    headroom: int | str | None = None,
    host_ram: int | str | None = None,
    batch: object = None,
    loss: Loss | str | None = None,
    optimizer: Optimizer | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Estimate:
    """Predict a plan's memory again: does it still fit?

    The recipe is traced with the installed torch and transformers and the model's
    config as it is now. No decision is taken, and no GPU is needed.

    Args:
        plan: From ``plan()``, or loaded from disk.
        model: Needed where the plan has none; a loaded one knows a hub id or config.
        gpu: Another card; left out: the planned one.
        vram: Another limit; alone, of the planned card, or of an assumed one where that
            has less.
        headroom: As for ``plan``; of the planned card, what was planned.
        host_ram: As for ``plan``; left out: of the planned card what was planned, of
            another what was given for the plan, else what is usual for that card.
        batch: Needed where the plan was made with one and loaded.
        loss: Likewise; ``file.py:function`` names one.
        optimizer: Likewise, a function of the parameters.
        trust_remote_code: Let a hub model's own code run.
        progress: Called with a line of text for each longer piece of work.

    Returns:
        The estimate, at the longest planned samples, and over all planned lengths or
        image sizes; ``fits`` is the answer.

    Raises:
        InputError: The model, batch or loss is not known, or the card cannot run it.
        TraceError: The model cannot run on fake tensors.
    """
    check_plan(plan)
    parsed = parse_again(
        plan,
        planned_arguments(plan, model, batch=batch, loss=loss, optimizer=optimizer),
        gpu=gpu,
        vram=vram,
        headroom=headroom,
        host_ram=host_ram,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    try:
        requested_precisions(plan.recipe.precision, parsed.target.gpu)
    except InputError as error:
        raise InputError(
            f"{error} A check changes no setting: plan for this card anew."
        ) from error
    found = estimate_recipe(parsed, plan.recipe)
    return at_least_planned(plan, found, parsed.workload)


def at_least_planned(plan: Plan, found: Estimate, workload: Workload) -> Estimate:
    """Return an estimate of the largest batch alone with what the sizes reserved.

    The plan's own figure is the least where its file does not say the sizes, and so
    they are not replayed; else the estimate as it is.
    """
    over = plan.varying_lengths
    if over is None or workload.lengths is not None:
        return found
    least = plan.estimate.reserved_bytes
    reserved = max(least, found.reserved_bytes)
    usable = found.usable_bytes or 0
    fits = bool(found.fits) and reserved <= usable
    note = (
        f"only the largest batch was replayed, not other sizes ({over.span}), which "
        f"this plan's file does not say: not less than the {format_bytes(least)} that "
        "were planned for them"
    )
    over = replace(over, reserved_bytes=reserved, fits=fits)
    return replace(with_lengths(found, over), notes=(*found.notes, note))
