"""Text report of ``plan.why``: why a block is checkpointed, and all options."""

from rich.console import Group, RenderableType
from rich.text import Text

from budgetfit.core.block_report import BlockChoice, BlockRow
from budgetfit.reporting.formatting import ops_text, time_text
from budgetfit.reporting.layout import bullets, section, table
from budgetfit.utils.format_bytes import format_bytes

_COLUMNS = ("", "waits", "adds", "micro-batch", "peak", "")
_SAME_MS = 1e-6  # times are whole nanoseconds
_LEGEND = (
    "waits: bytes from its forward to its backward. adds: time. micro-batch, peak: "
    "of the plan with only this changed, by the chain formula (live bytes)."
)


def why_text(row: BlockRow) -> RenderableType:
    """Render the explanation of one block."""
    return Group(
        section(_title(row), bullets(_reasons(row))),
        table(_COLUMNS, [_line(row, choice) for choice in row.choices], left=(0, 5)),
        Text(_LEGEND, style="dim"),
    )


def choice_text(choice: BlockChoice) -> str:
    """Name a checkpointing option."""
    if choice.mode == "selective":
        return f"saves {ops_text(choice.saved_ops)}"
    if choice.input_on_host:
        return "recomputed, input on host"
    names = {"keep": "kept", "recompute": "recomputed", "offload": "offloaded"}
    return names[choice.mode]


def _title(row: BlockRow) -> str:
    """State the chosen option in a sentence."""
    text = f"{row.name} is {choice_text(row.choice)}"
    if row.choice.mode == "selective":
        text = f"{row.name} is recomputed, {choice_text(row.choice)}"
    if len(row.segment) > 1:
        levels = ", in two levels" if row.nested else ""
        text += f" together with {len(row.segment) - 1} more{levels}"
    return text


def _reasons(row: BlockRow) -> list[str]:
    texts = [_cost(row)] if row.choice.mode != "keep" else []
    if row.choice.saved_ops:
        texts.append(f"recomputed but for {', '.join(row.choice.saved_ops)}")
    texts.append(_reason(row))
    texts.append(
        f"at its own peak {format_bytes(row.peak_bytes)} are alive, "
        f"{format_bytes(abs(row.headroom_bytes))} "
        f"{'below' if row.headroom_bytes >= 0 else 'above'} the limit of "
        f"{format_bytes(row.limit_bytes)}; "
        f"{format_bytes(row.prefix_bytes)} of that was there before it ran"
    )
    return texts


def _cost(row: BlockRow) -> str:
    """Memory saved and time added, against keeping all activations of the block."""
    kept, chosen = row.choices[0], row.choice
    saved = kept.saved_bytes - chosen.saved_bytes
    return (
        f"{format_bytes(abs(saved))} {'less' if saved >= 0 else 'more'} wait for its "
        f"backward than if it were kept, for {time_text(chosen.extra_ms)} in each "
        "micro-batch"
    )


def _reason(row: BlockRow) -> str:
    """Why no faster option was chosen."""
    now = row.choice
    faster = [c for c in row.choices if c.plan_ms < now.plan_ms - _SAME_MS]
    if not faster:
        return "nothing is faster, and the plan fits with it"
    over = [c for c in faster if c.plan_peak_bytes > row.limit_bytes]
    if len(over) == len(faster):
        least = min(over, key=lambda c: c.plan_peak_bytes)
        excess = least.plan_peak_bytes - row.limit_bytes
        return (
            "every faster treatment is too much: even "
            f"{choice_text(least)} would be {format_bytes(excess)} over the limit"
        )
    other = min((c for c in faster if c not in over), key=lambda choice: choice.plan_ms)
    gain = now.plan_ms - other.plan_ms
    return (
        f"{choice_text(other)} would be {time_text(gain)} faster and fit by the "
        "formula; the plan was chosen as a whole, by its objective and the judge"
    )


def _line(row: BlockRow, choice: BlockChoice) -> tuple[str, ...]:
    excess = choice.plan_peak_bytes - row.limit_bytes
    chosen = choice == row.choice
    verdict = "fits" if excess <= 0 else f"{format_bytes(excess)} too much"
    return (
        ("> " if chosen else "  ") + choice_text(choice),
        format_bytes(choice.saved_bytes),
        time_text(choice.extra_ms),
        time_text(choice.plan_ms),
        format_bytes(choice.plan_peak_bytes),
        "this plan" if chosen else verdict,
    )
