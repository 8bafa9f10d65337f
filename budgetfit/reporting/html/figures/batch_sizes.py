"""Batch size against samples per second."""

from matplotlib.ticker import NullLocator

from budgetfit.core.plan import Plan
from budgetfit.core.plan_curves import BatchSizePoint
from budgetfit.reporting.formatting import blocks_text
from budgetfit.reporting.html.colors import color
from budgetfit.reporting.html.figures.checkpointing import FORMULA
from budgetfit.reporting.html.section import Section, Table, count, memory, rate
from budgetfit.reporting.html.svg import Drawing, draw
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text

_FEW = 3  # points: no curve
_APART = 0.3  # relative: two sizes that are both named
_WIDE_RANGE = 12  # times: batch sizes on a logarithmic axis


def section(plan: Plan) -> Section | None:
    """Return the fastest that fits at each batch size."""
    curves = plan.lazy_curves() if plan.lazy_curves is not None else None
    if curves is None or len(curves.batch_sizes) < _FEW:
        return None
    points = curves.batch_sizes
    own = plan.recipe.batch_size

    def paint(drawing: Drawing) -> None:
        axes = drawing.axes
        sizes = [point.batch_size for point in points]
        rates = [point.samples_per_s for point in points]
        axes.plot(sizes, rates, color=color("parameters"), lw=2)
        for point in points:
            mine = point.batch_size == own
            dot = axes.scatter(
                point.batch_size,
                point.samples_per_s,
                s=90 if mine else 46,
                marker="D" if mine else "o",
                c=color("accent" if mine else "parameters"),
                edgecolors=color("paper"),
                linewidths=1.2,
                zorder=5,
            )
            drawing.say(dot, _said(plan, point))
        if max(sizes) > _WIDE_RANGE * min(sizes):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(_ticks(sizes, own), [str(n) for n in _ticks(sizes, own)])
        axes.set_ylim(0, max(rates) * 1.12)
        axes.set_xlabel("batch size")
        axes.set_ylabel("samples/s")
        axes.grid(axis="y", linewidth=0.8)
        axes.tick_params(length=0)

    return Section(
        title="Batch size against speed",
        text="The fastest checkpointing that fits at each batch size: a larger batch "
        "uses the GPU better, until it has to recompute more.",
        figure=draw(paint, label="Batch size against speed", height=280),
        legend=(("this plan", "accent"), ("other batch sizes", "parameters")),
        table=Table(
            caption="The fastest checkpointing that fits at each batch size",
            columns=(
                *("batch size", "accumulation", "allocated at most"),
                *("samples/s", "blocks not simply kept"),
            ),
            rows=tuple(
                (
                    count(point.batch_size),
                    count(point.gradient_accumulation_steps),
                    memory(point.peak_bytes),
                    rate(point.samples_per_s),
                    count(sum(len(each.blocks) for each in point.segments)),
                )
                for point in points
            ),
        ),
        note=FORMULA,
    )


def _ticks(sizes: list[int], own: int) -> list[int]:
    """Return the plan's size and others that are far enough from it and each other."""
    shown = [own]
    for size in (sizes[-1], sizes[0], *sizes):
        if all(abs(size / each - 1) > _APART for each in shown):
            shown.append(size)
    return sorted(shown)


def _said(plan: Plan, point: BatchSizePoint) -> str:
    recipe = type(plan.recipe)(batch_size=point.batch_size, segments=point.segments)
    return (
        f"batch size {point.batch_size}: {rate_text(point.samples_per_s)} samples/s at "
        f"{format_bytes(point.peak_bytes)}; {blocks_text(recipe, plan.model.blocks)}"
    )
