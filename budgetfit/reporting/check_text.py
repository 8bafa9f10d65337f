"""Text report of ``check``: a plan's memory as planned and as predicted now."""

from collections.abc import Mapping

from rich.console import Group, RenderableType

from budgetfit.core.plan import Estimate, Plan
from budgetfit.core.units import parse_bytes
from budgetfit.reporting.estimate_text import limit_text, recipe_lines
from budgetfit.reporting.header import gpu_text, model_lines
from budgetfit.reporting.layout import bullets, lines, section
from budgetfit.reporting.plan_text import versions_text
from budgetfit.utils.format_bytes import format_bytes


def check_text(
    plan: Plan,
    found: Estimate,
    gpu: str | None,
    vram: str | None,
    versions: Mapping[str, object],
) -> RenderableType:
    """Render whether a plan still fits, on ``gpu`` and ``vram`` if not the plan's."""
    planned = plan.estimate
    was = format_bytes(planned.reserved_bytes)
    now = format_bytes(found.reserved_bytes)
    own = card = gpu_text(plan.gpu, plan.budget.total_bytes)
    if gpu is not None:
        card = gpu if vram is None else f"{gpu}, limited to {vram}"
    elif vram is not None:
        limit = parse_bytes(vram)
        is_on_it = limit <= plan.gpu.total_bytes
        card = gpu_text(plan.gpu, limit) if is_on_it else vram
    body = [
        *recipe_lines(plan.recipe, plan.model.blocks),
        f"planned: reserved {was}, {own}, {versions_text(plan.provenance)}",
        f"now:     reserved {now}, {card}, {versions_text(versions)}",
    ]
    parts = [lines([*model_lines(plan.model), ""])]
    parts.append(section("CHECK", lines(body), limit_text(found)))
    if found.notes:
        parts.append(section("WATCH OUT", bullets(found.notes)))
    return Group(*parts)
