"""The same training on several GPUs."""

from collections.abc import Sequence

from budgetfit.core.plan import GpuComparison
from budgetfit.reporting.html.bars import Bar, bars
from budgetfit.reporting.html.section import Cell, Section, Table, memory, rate
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text


def section(comparison: Sequence[GpuComparison]) -> Section | None:
    """Return the best settings on each GPU; None without a comparison."""
    if not comparison:
        return None
    several = len({row.method for row in comparison}) > 1
    rows = [
        (f"{row.name}, {row.method}" if several else row.name, row)
        for row in comparison
    ]
    return Section(
        title="Speed on each GPU",
        text="Each with its own best settings. One without a bar does not fit.",
        figure=bars(
            "Samples per second on each GPU",
            [
                Bar(
                    name,
                    row.estimate.samples_per_s if row.fits and row.estimate else 0,
                    _beside(row),
                    "parameters",
                )
                for name, row in rows
            ],
        ),
        table=Table(
            caption="The best settings on each GPU",
            columns=(
                *("", "batch", "accumulation", "precision"),
                *("reserved", "limit", "samples/s", ""),
            ),
            rows=tuple((name, *_cells(row)) for name, row in rows),
        ),
    )


def _beside(row: GpuComparison) -> str:
    if row.estimate is None:
        return "cannot run what was asked for"
    if not row.fits:
        return f"too much: {format_bytes(row.estimate.reserved_bytes)}"
    return (
        f"{rate_text(row.estimate.samples_per_s)}/s, "
        f"batch {row.estimate.recipe.batch_size}"
    )


def _cells(row: GpuComparison) -> tuple[Cell, ...]:
    limit = memory(row.budget.usable_bytes)
    if row.estimate is None:
        return ("", "", "", "", limit, "", row.problem)
    recipe = row.estimate.recipe
    return (
        str(recipe.batch_size),
        str(recipe.gradient_accumulation_steps),
        recipe.precision,
        memory(row.estimate.reserved_bytes),
        limit,
        rate(row.estimate.samples_per_s),
        "fits" if row.fits else "too much",
    )
