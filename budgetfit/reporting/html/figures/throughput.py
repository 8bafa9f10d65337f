"""Samples per second of the plan, of usual practices and of other choices."""

from operator import attrgetter

from budgetfit.core.plan import Alternative, Estimate, Plan
from budgetfit.reporting.formatting import blocks_text, percent_text
from budgetfit.reporting.html.bars import Bar, bars
from budgetfit.reporting.html.section import Section, Table, duration, memory, rate
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text

THIS_PLAN = "this plan"
_LEGEND = {
    "accent": "this plan",
    "cached": "the same training",
    "temporaries": "changes what is trained",
}


def section(plan: Plan) -> Section | None:
    """Return the plan and its alternatives, each at its own best batch size."""
    if not plan.alternatives:
        return None
    others = sorted(plan.alternatives, key=attrgetter("changes_training"))
    rows = [(THIS_PLAN, plan.estimate, plan.fits, "accent"), *map(_row, others)]
    shades = {shade for *_, shade in rows}
    return Section(
        title="How fast it is, and what others take",
        text="Each at its own best batch size. An outline does not fit.",
        figure=bars(
            "Samples per second of the plan and of other choices",
            [
                Bar(
                    name,
                    estimate.samples_per_s,
                    _beside(plan, estimate),
                    shade,
                    hollow=not fits,
                    said=_said(plan, name, estimate, fits=fits),
                )
                for name, estimate, fits, shade in rows
            ],
        ),
        legend=tuple(
            (text, shade) for shade, text in _LEGEND.items() if shade in shades
        ),
        table=Table(
            caption="The plan and its alternatives",
            columns=(
                *("", "batch", "accumulation", "allocated", "reserved"),
                *("one step", "samples/s", ""),
            ),
            rows=tuple(
                (
                    name,
                    str(estimate.recipe.batch_size),
                    str(estimate.recipe.gradient_accumulation_steps),
                    memory(estimate.allocated_bytes),
                    memory(estimate.reserved_bytes),
                    duration(estimate.step_ms),
                    rate(estimate.samples_per_s),
                    "fits" if fits else "too much",
                )
                for name, estimate, fits, _ in rows
            ),
        ),
    )


def _row(row: Alternative) -> tuple[str, Estimate, bool, str]:
    shade = "temporaries" if row.changes_training else "cached"
    return row.label, row.estimate, row.fits, shade


def _beside(plan: Plan, estimate: Estimate) -> str:
    """Return the rate, and the ratio to the plan."""
    text = f"{rate_text(estimate.samples_per_s)}/s"
    own = plan.estimate
    if estimate is own:
        return text
    if (estimate.recipe, estimate.step_ms) == (own.recipe, own.step_ms):
        return f"{text} (the same)"
    ratio = estimate.samples_per_s / own.samples_per_s - 1
    return f"{text} ({percent_text(ratio)})"


def _said(plan: Plan, name: str, estimate: Estimate, *, fits: bool) -> str:
    recipe = estimate.recipe
    return (
        f"{name}: {rate_text(estimate.samples_per_s)} samples/s, batch "
        f"{recipe.batch_size} x {recipe.gradient_accumulation_steps}, "
        f"{recipe.precision}, {recipe.optimizer}; "
        f"{blocks_text(recipe, plan.model.blocks)}; "
        f"{format_bytes(estimate.reserved_bytes)} reserved, "
        f"{'fits' if fits else 'too much'}"
    )
