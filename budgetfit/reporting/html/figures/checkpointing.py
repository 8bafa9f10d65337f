"""Memory against speed: what checkpointing can trade at the plan's batch size."""

from dataclasses import replace

from budgetfit.core.plan import Plan
from budgetfit.core.plan_curves import CheckpointingPoint, PlanCurves
from budgetfit.reporting.formatting import blocks_text
from budgetfit.reporting.html.colors import color
from budgetfit.reporting.html.labels import Label, write_labels
from budgetfit.reporting.html.section import Number, Section, Table, memory, rate
from budgetfit.reporting.html.svg import Drawing, draw
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text

_THIS_PLAN = "this plan"
_FEW = 2  # points: no curve
FORMULA = (
    "This plan is as it was judged, by the replay. The others are by the formula that "
    "the solver uses, scaled to give the same for this plan: close to a replay, not "
    "equal."
)


def section(plan: Plan) -> Section | None:
    """Return the Pareto front with the plan and usual practices on it."""
    curves = plan.lazy_curves() if plan.lazy_curves is not None else None
    if curves is None or len(curves.front) < _FEW:
        return None
    same = [p.label for p in curves.practices if p.segments == curves.plan.segments]
    own = replace(curves.plan, label=": ".join([_THIS_PLAN, *same]))

    def paint(drawing: Drawing) -> None:
        _axes(drawing, curves)
        _front(drawing, plan, curves)
        shown = [own, *(p for p in curves.practices if p.segments != own.segments)]
        for point in reversed(shown):
            _mark(drawing, plan, point)
        write_labels(
            drawing.axes,
            [_name(drawing, point) for point in shown],
            [_corners(curves), [(curves.limit_bytes, y) for y in _limits(curves)[1]]],
        )

    rows = [replace(own, label=_THIS_PLAN), *curves.practices, *curves.front]
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
            columns=("", "allocated at most", "samples/s", "blocks not simply kept"),
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
        note=FORMULA,
    )


def _wrapped(point: CheckpointingPoint) -> int:
    return sum(len(segment.blocks) for segment in point.segments)


def _front(drawing: Drawing, plan: Plan, curves: PlanCurves) -> None:
    drawing.axes.plot(*zip(*_corners(curves), strict=True), c=color("parameters"), lw=2)
    for point in curves.front:
        (dot,) = drawing.axes.plot(
            point.peak_bytes, point.samples_per_s, "o", ms=5, color=color("parameters")
        )
        drawing.say(dot, _said(plan, point), focus=False)


def _mark(drawing: Drawing, plan: Plan, point: CheckpointingPoint) -> None:
    """Draw a point that has a name."""
    own = _is_plan(point)
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


def _name(drawing: Drawing, point: CheckpointingPoint) -> Label:
    text = point.label
    if drawing.narrow:
        text = text.replace(" recomp", "\nrecomp").replace(": ", ":\n")
    return Label(text, point.peak_bytes, point.samples_per_s, _is_plan(point))


def _is_plan(point: CheckpointingPoint) -> bool:
    return point.label.startswith(_THIS_PLAN)


def _corners(curves: PlanCurves) -> list[tuple[float, float]]:
    """Return where the line of the front bends."""
    corners: list[tuple[float, float]] = []
    for point in curves.front:
        if corners:
            corners.append((corners[-1][0], point.samples_per_s))
        corners.append((point.peak_bytes, point.samples_per_s))
    return corners


def _said(plan: Plan, point: CheckpointingPoint) -> str:
    name = f"{point.label}: " if point.label else ""
    recipe = plan.recipe
    segments = type(recipe)(batch_size=recipe.batch_size, segments=point.segments)
    return (
        f"{name}{rate_text(point.samples_per_s)} samples/s at "
        f"{format_bytes(point.peak_bytes)}; {blocks_text(segments, plan.model.blocks)}"
    )


def _limits(curves: PlanCurves) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ends of both axes: memory, and samples per second."""
    points = (*curves.front, *curves.practices, curves.plan)
    sizes = [*(point.peak_bytes for point in points), curves.limit_bytes]
    rates = [point.samples_per_s for point in points]
    left = (max(sizes) - min(sizes)) * 0.08 or max(sizes) * 0.08
    below = (max(rates) - min(rates)) * 0.16 or max(rates) * 0.16
    return (
        (max(min(sizes) - left, 0), max(sizes) + left),
        (max(min(rates) - below, 0), max(rates) + below),
    )


def _axes(drawing: Drawing, curves: PlanCurves) -> None:
    axes = drawing.axes
    memory_ends, rate_ends = _limits(curves)
    axes.set_xlim(*memory_ends)
    axes.set_ylim(*rate_ends)
    axes.axvline(
        curves.limit_bytes, color=color("limit"), lw=1.6, linestyle=(0, (5, 3))
    )
    axes.set_ylabel("samples/s")
    axes.set_xlabel("allocated at most")
    axes.grid(axis="y", linewidth=0.8)
    drawing.memory_axis("x", int(memory_ends[1]))
