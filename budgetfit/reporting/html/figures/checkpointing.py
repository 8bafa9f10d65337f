"""Memory against speed: what checkpointing can trade at the plan's batch size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.reporting.formatting import blocks_text, rate_text
from budgetfit.reporting.html.colors import color
from budgetfit.reporting.html.section import Section
from budgetfit.reporting.html.svg import draw
from budgetfit.reporting.html.table import Number, Table, memory, rate
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from budgetfit.core.plan import Plan
    from budgetfit.core.plan_curves import CheckpointingPoint, PlanCurves
    from budgetfit.reporting.html.svg import Drawing

_THIS_PLAN = "this plan"
_FEW = 2  # points: no curve


def section(plan: Plan) -> Section | None:
    """Return the Pareto front with the plan and usual practices on it."""
    curves = plan.lazy_curves() if plan.lazy_curves is not None else None
    if curves is None or len(curves.front) < _FEW:
        return None
    own = replace(curves.plan, label=_THIS_PLAN)

    def paint(drawing: Drawing) -> None:
        _axes(drawing, curves)
        _front(drawing, plan, curves)
        for point in curves.practices:
            _mark(drawing, plan, point)
        _mark(drawing, plan, own)

    rows = [own, *curves.practices, *curves.front]
    return Section(
        title="Memory against speed",
        text="The line is the best that checkpointing can do at batch size "
        f"{plan.recipe.batch_size}: further up is faster, further left takes less "
        "memory. What is right of the dashed line does not fit.",
        figure=draw(paint, label="Memory against speed", height=340),
        legend=(
            (_THIS_PLAN, "accent"),
            ("usual practices", "gradients"),
            ("the best that is possible", "parameters"),
        ),
        table=Table(
            caption=f"Checkpointing at batch size {plan.recipe.batch_size}",
            columns=("", "peak of live memory", "samples/s", "blocks not simply kept"),
            rows=tuple(
                (
                    row.label or "best",
                    memory(row.peak_bytes),
                    rate(row.samples_per_s),
                    Number(str(blocks := _wrapped(row)), blocks),
                )
                for row in rows
            ),
        ),
        note="By the formula that the solver uses, which may differ a little from the "
        "replay that the other figures are of.",
    )


def _wrapped(point: CheckpointingPoint) -> int:
    return sum(len(segment.blocks) for segment in point.segments)


def _front(drawing: Drawing, plan: Plan, curves: PlanCurves) -> None:
    sizes = [point.peak_bytes for point in curves.front]
    rates = [point.samples_per_s for point in curves.front]
    drawing.axes.plot(
        sizes, rates, color=color("parameters"), lw=2, drawstyle="steps-pre"
    )
    for point in curves.front:
        (dot,) = drawing.axes.plot(
            point.peak_bytes, point.samples_per_s, "o", ms=5, color=color("parameters")
        )
        drawing.say(dot, _said(plan, point), focus=False)


def _mark(drawing: Drawing, plan: Plan, point: CheckpointingPoint) -> None:
    """Draw a point with its name beside it."""
    own = point.label == _THIS_PLAN
    dot = drawing.axes.scatter(
        point.peak_bytes,
        point.samples_per_s,
        s=90 if own else 60,
        c=color("accent" if own else "gradients"),
        marker="D" if own else "o",
        edgecolors=color("paper"),
        linewidths=1.2,
        zorder=5,
    )
    drawing.say(dot, _said(plan, point))
    low, high = drawing.axes.get_xlim()
    right = point.peak_bytes > low + (high - low) * (0.5 if drawing.narrow else 0.7)
    beside = drawing.axes.annotate(
        point.label.replace(" recomp", "\nrecomp") if drawing.narrow else point.label,
        (point.peak_bytes, point.samples_per_s),
        xytext=(-9 if right else 9, 6 if own else -6),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom" if own else "top",
        fontweight="bold" if own else "normal",
    )
    beside.set_in_layout(False)


def _said(plan: Plan, point: CheckpointingPoint) -> str:
    name = f"{point.label}: " if point.label else ""
    recipe = plan.recipe
    segments = type(recipe)(batch_size=recipe.batch_size, segments=point.segments)
    return (
        f"{name}{rate_text(point.samples_per_s)} samples/s at "
        f"{format_bytes(point.peak_bytes)}; "
        f"{blocks_text(segments, plan.model.blocks)}"
    )


def _axes(drawing: Drawing, curves: PlanCurves) -> None:
    axes = drawing.axes
    points = (*curves.front, *curves.practices, curves.plan)
    sizes = [*(point.peak_bytes for point in points), curves.limit_bytes]
    room = (max(sizes) - min(sizes)) * 0.08 or max(sizes) * 0.08
    axes.set_xlim(max(min(sizes) - room, 0), max(sizes) + room)
    rates = [point.samples_per_s for point in points]
    room = (max(rates) - min(rates)) * 0.12 or max(rates) * 0.12
    axes.set_ylim(max(min(rates) - room, 0), max(rates) + 1.6 * room)
    axes.axvline(
        curves.limit_bytes, color=color("limit"), lw=1.6, linestyle=(0, (5, 3))
    )
    axes.set_ylabel("samples/s")
    axes.set_xlabel("peak of live memory")
    axes.grid(axis="y", linewidth=0.8)
    drawing.memory_axis("x", max(sizes))
