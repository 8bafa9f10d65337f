"""What happens to the activations of each block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Segment
from budgetfit.reporting.formatting import blocks_text
from budgetfit.reporting.html.colors import TREATMENTS, color
from budgetfit.reporting.html.section import Cell, Section, Table, duration, memory
from budgetfit.reporting.html.svg import Drawing, draw
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_NAMES = {
    "keep": "kept",
    "selective": "recomputed, some ops saved",
    "recompute": "recomputed",
    "offload": "offloaded to the host",
}
_PER_ROW, _PER_NARROW_ROW = 32, 12


def section(plan: Plan) -> Section | None:
    """Return the blocks in the order in which they run, by their treatment."""
    blocks = plan.model.blocks
    if not blocks:
        return None
    own = {name: each for each in plan.recipe.segments for name in each.blocks}
    modes = [own[name].mode if name in own else "keep" for name in blocks]
    said = [_said(plan, name, own.get(name)) for name in blocks]

    def paint(drawing: Drawing) -> None:
        rows = -(-len(modes) // (_PER_NARROW_ROW if drawing.narrow else _PER_ROW))
        per_row = -(-len(modes) // rows)
        for number, mode in enumerate(modes):
            row, column = divmod(number, per_row)
            shade = color(TREATMENTS[mode])
            (cell,) = drawing.axes.bar(
                column, 0.72, 0.9, -row, color=shade, align="edge", lw=0
            )
            drawing.say(cell, said[number])
            if column == 0 or number == len(modes) - 1:
                _number(drawing.axes, number, column, -row)
        _join(drawing.axes, plan, per_row)
        drawing.axes.set_xlim(-0.1, min(per_row, max(len(modes), 6)))
        drawing.axes.set_ylim(-((len(modes) - 1) // per_row) - 0.2, 1)
        drawing.axes.axis("off")

    rows = -(-len(modes) // _PER_ROW), -(-len(modes) // _PER_NARROW_ROW)
    return Section(
        title="What happens to each block",
        text=f"{blocks_text(plan.recipe, blocks)}. A line joins blocks that are "
        "recomputed together."
        if any(len(each.blocks) > 1 for each in plan.recipe.segments)
        else f"{blocks_text(plan.recipe, blocks)}.",
        figure=draw(
            paint,
            label="What happens to each block",
            height=48 * rows[0] + 10,
            narrow_height=46 * rows[1] + 10,
        ),
        legend=tuple(
            (text, TREATMENTS[mode]) for mode, text in _NAMES.items() if mode in modes
        ),
        table=_table(plan, own),
    )


def _number(axes: Axes, number: int, column: int, row: int) -> None:
    """Write the number of a block above it."""
    axes.annotate(
        str(number),
        (column + 0.45, row + 0.76),
        ha="center",
        color=color("soft-ink"),
        fontsize=11,
    )


def _join(axes: Axes, plan: Plan, per_row: int) -> None:
    """Draw a line under blocks of one segment."""
    at = {name: number for number, name in enumerate(plan.model.blocks)}
    for segment in plan.recipe.segments:
        if len(segment.blocks) > 1:
            for name in segment.blocks:
                row, column = divmod(at[name], per_row)
                end = 1.0 if name != segment.blocks[-1] else 0.9
                axes.plot(
                    [column, column + end], [-row - 0.08] * 2, color=color("ink"), lw=2
                )


def _said(plan: Plan, name: str, segment: Segment | None) -> str:
    """Say the treatment of a block, what waits for its backward and what it costs."""
    text = f"{name}: {_NAMES[segment.mode if segment else 'keep']}"
    if segment is not None and len(segment.blocks) > 1:
        text += f" together with {len(segment.blocks) - 1} more"
    for row in plan.block_table:
        if row.name == name:
            text += (
                f"; {format_bytes(row.choice.saved_bytes)} wait for its backward, "
                f"{row.choice.extra_ms:.3g} ms more in each micro-batch"
            )
    return text


def _table(plan: Plan, own: dict[str, Segment]) -> Table:
    known = {row.name: row for row in plan.block_table}
    rows: list[tuple[Cell, ...]] = []
    for name in plan.model.blocks:
        text, row = _NAMES[own[name].mode if name in own else "keep"], known.get(name)
        if row is None:
            rows.append((name, text, "", ""))
            continue
        choice = row.choice
        rows.append((name, text, memory(choice.saved_bytes), duration(choice.extra_ms)))
    return Table(
        caption="Each block: what waits for its backward pass, and the time it adds to "
        "a micro-batch, by the chain formula",
        columns=("block", "activations", "waits", "adds"),
        rows=tuple(rows),
    )
