"""A comparison of cards as text: the answer, then one line for each card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from budgetfit.core.byte_text import format_bytes
from budgetfit.reporting.header import model_lines
from budgetfit.reporting.layout import bullets, lines, section, table
from budgetfit.reporting.words import rate_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.core.card_row import CardRow
    from budgetfit.core.plan import ModelSummary

GIB = 2**30
_COLUMNS = ("card", "fits", "batch", "precision", "peak, GiB", "redone", "per s", "")
_LEGEND = (
    "batch: micro-batch x accumulation. peak: reserved, of what is usable. redone: "
    "blocks not simply kept. per s: samples, a roofline estimate; against the slowest "
    "that fits."
)


def compare_text(rows: Sequence[CardRow], model: ModelSummary) -> RenderableType:
    """Render the cards in the order in which they were named."""
    fitting = [row for row in rows if row.fits]
    slowest = min((_speed(row) for row in fitting), default=0.0)
    parts = [
        lines([*model_lines(model), ""]),
        section("WHICH CARD", lines(_answer(fitting, rows))),
        table(_COLUMNS, [_line(row, slowest) for row in rows], left=(0, 1, 3)),
        Text(_LEGEND, style="dim"),
    ]
    said = [text for row in rows for text in (row.problem, *row.warnings) if text]
    if said:
        parts += [Text(""), bullets(dict.fromkeys(said))]
    return Group(*parts)


def _answer(fitting: Sequence[CardRow], rows: Sequence[CardRow]) -> list[str]:
    if not fitting:
        needs = [row.estimate for row in rows if row.estimate is not None]
        if not needs:
            return ["None of these cards can run what was asked for."]
        least = min(estimate.reserved_bytes for estimate in needs)
        return [f"It fits on none of these: at least {format_bytes(least)} are needed."]
    smallest = min(fitting, key=lambda row: row.gpu.total_bytes)
    fastest = max(fitting, key=_speed)
    if smallest is fastest:
        return [f"{smallest.gpu.name}: the smallest that fits, and the fastest."]
    ratio = _speed(fastest) / _speed(smallest)
    return [
        f"{smallest.gpu.name} is the smallest that fits.",
        f"{fastest.gpu.name} is the fastest: {ratio:.3g} times as fast.",
    ]


def _speed(row: CardRow) -> float:
    return row.estimate.samples_per_s if row.estimate is not None else 0.0


def _line(row: CardRow, slowest: float) -> tuple[str, ...]:
    usable = f"of {row.budget.usable_bytes / GIB:.2f}"
    if row.estimate is None:
        return (row.gpu.name, "no", "-", "-", f"- {usable}", "-", "-", "")
    recipe = row.estimate.recipe
    fits = row.fits
    return (
        row.gpu.name,
        "yes" if fits else "no",
        f"{recipe.batch_size} x {recipe.gradient_accumulation_steps}",
        recipe.precision,
        f"{row.estimate.reserved_bytes / GIB:.2f} {usable}",
        f"{len(recipe.wrapped_blocks)} of {row.blocks}",
        rate_text(_speed(row)) if fits else "-",
        f"{_speed(row) / slowest:.3g}x" if fits else "",
    )
