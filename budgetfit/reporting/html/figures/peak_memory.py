"""What is allocated at the peak, by category."""

from budgetfit.core.plan import Plan
from budgetfit.reporting.html.bars import Bar, bars
from budgetfit.reporting.html.figures.step_memory import where
from budgetfit.reporting.html.section import Number, Section, Table, memory
from budgetfit.utils.format_bytes import format_bytes

_LEAST = 0.01


def section(plan: Plan) -> Section | None:
    """Return the peak's parts, largest first, and the largest layers."""
    estimate = plan.estimate
    line = estimate.timeline
    parts = sorted(estimate.at_peak_bytes.items(), key=lambda pair: -pair[1])
    parts = [(name, size) for name, size in parts if size]
    if not parts:
        return None
    total = max(estimate.allocated_bytes, 1)
    moment = f", {where(line.points[line.peak])}" if line.points else ""
    layers = [
        (f"layer {name}" if name else "outside every layer", size)
        for name, size in line.at_peak_layers
    ]
    rows = [(name.replace("_", " "), size) for name, size in parts]
    rows += [("all of it", estimate.allocated_bytes), *layers]
    return Section(
        title="What is allocated at the peak",
        text=f"{format_bytes(estimate.allocated_bytes)}{moment}. "
        "Recomputing blocks lowers activations alone.",
        figure=bars(
            "What is allocated at the peak",
            [
                Bar(
                    name.replace("_", " "),
                    size,
                    f"{format_bytes(size)}, {_share(size / total)}",
                    name.replace("_", "-"),
                )
                for name, size in parts
            ],
        ),
        table=Table(
            caption="Allocated at the peak, by category; then the largest layers",
            columns=("", "bytes", "of the peak"),
            rows=tuple(
                (name, memory(size), Number(f"{size / total:.1%}", size / total))
                for name, size in rows
            ),
        ),
    )


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= _LEAST else f"less than {_LEAST:.0%}"
