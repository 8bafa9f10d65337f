"""The row "with torch.compile (blocks)": a plan's own recipe, compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from budgetfit.core.plan import Alternative, Estimate
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError, TraceError

if TYPE_CHECKING:
    from budgetfit.planning.session import PlanningSession

LABEL: Final = "with torch.compile (blocks)"
_NOTE: Final = (
    'compile="blocks" (--compile blocks): here with the batch and recomputed blocks of '
    "this plan, planned with it maybe with others; the first step compiles, which "
    "takes a minute or so"
)


def compiled_row(session: PlanningSession, plan: Estimate) -> tuple[Alternative, ...]:
    """Return the plan's recipe with compiled blocks, judged; none where it cannot be.

    Its batch size and segments are not searched for: that is a plan of its own.
    """
    recipe = plan.recipe
    if recipe.compile != "none" or not session.workload.blocks:
        return ()
    try:
        found = session.judge(with_compiled_blocks(recipe))
    except (InputError, TraceError) as error:
        session.traces.log.append(f"{LABEL} is not shown: {error}")
        return ()
    return (
        Alternative(label=LABEL, estimate=found, fits=bool(found.fits), note=_NOTE),
    )


def with_compiled_blocks(recipe: Recipe) -> Recipe:
    """Return a recipe with compiled blocks.

    Those under selective checkpointing would run eagerly, and are recomputed instead.
    """
    segments = tuple(
        Segment(each.blocks) if each.mode == "selective" else each
        for each in recipe.segments
    )
    return replace(recipe, segments=segments, compile="blocks")
