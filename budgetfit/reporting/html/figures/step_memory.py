"""Memory over one training step, by category, against the limit."""

from itertools import groupby
from operator import attrgetter

from budgetfit.core.memory_timeline import TimelinePoint
from budgetfit.core.plan import Plan
from budgetfit.reporting.html.colors import color
from budgetfit.reporting.html.section import Section, Table, memory
from budgetfit.reporting.html.svg import Drawing, draw
from budgetfit.utils.format_bytes import format_bytes

ALLOCATED = "allocated"  # where a saved plan has no categories
# From the bottom: what stays in every step, then what comes and goes.
ORDER = (
    *("parameters", "buffers", "optimizer_state", "gradients", "batch"),
    *("activations", "workspace", "temporaries"),
)
_MOST_MOMENTS = 600  # a page of a thousand blocks stays below 1.5 MB
_LEAST_SHARE = 0.06  # of the width: a phase that is named below the axis


def section(plan: Plan) -> Section | None:
    """Return the timeline of the step with the peak."""
    moments = _moments(plan)
    if not moments:
        return None
    shown = [name for name in (*ORDER, ALLOCATED) if any(_of(moments, name))]

    def paint(drawing: Drawing) -> None:
        _areas(drawing, moments, shown)
        _limit(drawing, plan, max(point.reserved_bytes for point, _ in moments))
        _phases(drawing, [point for point, _ in moments])

    names = tuple(name.replace("_", " ") for name in shown)
    return Section(
        title="Memory over one training step",
        text=_text(plan),
        figure=draw(paint, label="Memory over one training step", height=330),
        legend=tuple(
            (text, _color_name(name)) for text, name in zip(names, shown, strict=True)
        ),
        table=Table(
            caption="The peak within each block and phase",
            columns=("", *(names if shown != [ALLOCATED] else ()), *_TOTALS),
            rows=tuple(
                (
                    where(point),
                    *(memory(held.get(n, 0)) for n in shown if n != ALLOCATED),
                    memory(point.allocated_bytes),
                    memory(point.reserved_bytes),
                )
                for point, held in moments
            ),
        ),
        note=""
        if plan.lazy_curves is not None
        else "A saved plan has no categories over time: make the report with "
        "budgetfit plan --report.",
    )


def _text(plan: Plan) -> str:
    text = (
        "The peak within each block, forward and backward, in the order in which they "
        "run. What is reserved (thin line) has to stay below the limit (dashed)."
    )
    if plan.recipe.gradient_accumulation_steps > 1:
        text += " Of several micro-batches: the first, and the one with the peak."
    if plan.varying_lengths is not None:
        text += (
            " All batches are of the largest size here: over batches of all sizes "
            f"{format_bytes(plan.estimate.reserved_bytes)} are reserved."
        )
    return text


_TOTALS = ("allocated", "reserved")
Moment = tuple["TimelinePoint", dict[str, int]]


def where(point: TimelinePoint) -> str:
    """Name a moment: ``backward of h.3``."""
    return f"{point.phase} of {point.block}" if point.block else point.phase


def _moments(plan: Plan) -> list[Moment]:
    """Return the points of the step with the peak, each with its categories."""
    # Of several that are too many to show, the highest.
    line = plan.estimate.timeline
    if not line.points:
        return []
    curves = plan.lazy_curves() if plan.lazy_curves is not None else None
    held: tuple[dict[str, int], ...] = curves.category_bytes if curves else ()
    if len(held) != len(line.points):
        held = tuple({ALLOCATED: each.allocated_bytes} for each in line.points)
    peak = line.points[line.peak]
    # The first micro-batch, where gradients appear, and the one with the peak.
    shown = {0, peak.micro_step}
    moments = [
        (point, each)
        for point, each in zip(line.points, held, strict=True)
        if point.step == peak.step
        and (point.micro_step in shown or point.phase == "optimizer")
    ]
    together = -(-len(moments) // _MOST_MOMENTS)
    return [
        max(moments[start : start + together], key=lambda pair: pair[0].allocated_bytes)
        for start in range(0, len(moments), together)
    ]


def _of(moments: list[Moment], name: str) -> list[int]:
    return [held.get(name, 0) for _, held in moments]


def _color_name(category: str) -> str:
    return "activations" if category == ALLOCATED else category.replace("_", "-")


def _areas(drawing: Drawing, moments: list[Moment], shown: list[str]) -> None:
    """Draw the categories on top of each other, and reserved memory above them."""
    edges = range(len(moments) + 1)
    below = [0] * len(edges)
    for name in shown:
        sizes = _of(moments, name)
        above = [a + b for a, b in zip(below, [*sizes, sizes[-1]], strict=True)]
        drawing.axes.fill_between(
            edges, below, above, step="post", color=color(_color_name(name)), lw=0.3
        )
        below = above
    reserved = [point.reserved_bytes for point, _ in moments]
    drawing.axes.stairs(
        reserved, edges, color=color("ink"), linewidth=1.4, baseline=None
    )
    if drawing.narrow:  # fingers are wider than these: the table has the numbers
        return
    top = max(reserved)
    bars = drawing.axes.bar(edges[:-1], top, width=1, align="edge", alpha=0, lw=0)
    for bar, (point, held) in zip(bars, moments, strict=True):
        parts = sorted(held.items(), key=lambda item: -item[1])
        text = f"{where(point)}: {format_bytes(point.allocated_bytes)} allocated"
        if ALLOCATED not in held:
            text += ", of that " + ", ".join(
                f"{name.replace('_', ' ')} {format_bytes(size)}"
                for name, size in parts
                if size
            )
        text += f"; {format_bytes(point.reserved_bytes)} reserved"
        drawing.say(bar, text, focus=False)


def _limit(drawing: Drawing, plan: Plan, reserved_bytes: int) -> None:
    """Draw the limit, name both lines, and set the axes."""
    axes, limit = drawing.axes, plan.budget.usable_bytes
    top = max(limit, reserved_bytes)
    axes.axhline(limit, color=color("limit"), linewidth=1.6, linestyle=(0, (5, 3)))
    axes.annotate(
        f"limit {format_bytes(limit)}",
        (0.004, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=color("limit"),
        fontweight="bold",
    )
    axes.set_ylim(0, top * 1.12)
    drawing.memory_axis("y", top)
    drawing.axes.annotate(
        f"reserved {format_bytes(reserved_bytes)}",
        (0.996, min(reserved_bytes, limit)),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4 if reserved_bytes < 0.93 * limit else 18),
        textcoords="offset points",
        ha="right",
        color=color("ink"),
    )


def _phases(drawing: Drawing, points: list[TimelinePoint]) -> None:
    """Name the phases below the axis and part them by lines."""
    axes, start = drawing.axes, 0
    least = _LEAST_SHARE * (2 if drawing.narrow else 1) * len(points)
    ticks, names = [], []
    for (_, phase), group in groupby(points, attrgetter("micro_step", "phase")):
        end = start + len(list(group))
        if start:
            axes.axvline(start, color=color("paper"), linewidth=1.2, zorder=1.5)
        if end - start >= least:
            ticks.append((start + end) / 2)
            names.append(phase)
        start = end
    axes.set_xlim(0, len(points))
    axes.set_xticks(ticks, names)
    axes.tick_params(axis="x", length=0)
