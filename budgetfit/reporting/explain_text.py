"""Text report of ``budgetfit explain``: cause, memory breakdown, advice."""

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from budgetfit.explain.explanation import Advice, Explanation
from budgetfit.reporting.layout import Bar, bullets, commands_text, lines, section
from budgetfit.utils.format_bytes import format_bytes

_PHASES: Final = {
    "loading": "while weights were loaded",
    "to_device": "while the model was moved to the card",
    "forward": "in the forward",
    "backward": "in the backward",
    "optimizer": "in the optimizer's step",
    "evaluation": "in an evaluation",
    "unknown": "where it failed the text does not tell (hand in the traceback, too)",
}


def explain_text(found: Explanation) -> RenderableType:
    """Render an explanation."""
    parts = [section(f"WHY  {found.cause}", lines([found.summary, *_where(found)]))]
    if found.parts:
        total = found.message.total_bytes
        side = "" if total is None else f"the card: {format_bytes(total)}"
        parts.append(section("WHERE IT WENT", _table(found), side))
    advice = Group(*map(_advice, found.advice))
    parts.append(section("WHAT TO CHANGE", advice, "what helps most first"))
    parts.append(section("NEXT", commands_text(found.commands, indent="")))
    return Group(*parts)


def _where(found: Explanation) -> list[str]:
    where = found.where
    text = _PHASES[where.phase]
    if where.recomputing:
        text += ", while a block was recomputed"
    if where.in_loss:
        text += ", in the loss"
    if where.family:
        text += f", of a {where.family} model"
    texts = [f"It happened {text}." if where.phase != "unknown" else f"{text}."]
    texts[0] = texts[0][0].upper() + texts[0][1:]
    if where.place:
        texts.append(f"From {where.place}.")
    if found.messages > 1:
        texts.append(f"The text has {found.messages} messages; this is of the last.")
    return texts


def _table(found: Explanation) -> RenderableType:
    total = found.message.total_bytes or sum(part.bytes for part in found.parts)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(justify="right")
    for part in found.parts:
        share = part.bytes / max(total, 1)
        meaning = Text(part.meaning, style="dim")
        grid.add_row(
            Text(part.name), Text(format_bytes(part.bytes)), Bar(share, 12), meaning
        )
    return grid


def _advice(advice: Advice) -> RenderableType:
    enough = " This alone is enough for what was missing." if advice.enough else ""
    return Group(bullets([advice.text + enough]), commands_text(advice.commands))
