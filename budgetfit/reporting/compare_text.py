"""Text report of ``budgetfit compare``: the recommended GPU, then a table."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from budgetfit.core.plan import GpuComparison, ModelSummary
from budgetfit.reporting.formatting import hours_text, money_text
from budgetfit.reporting.header import model_lines
from budgetfit.reporting.layout import bullets, lines, section, table
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text

GIB = 2**30
_COLUMNS = ("fits", "batch", "precision", "peak, GiB", "not kept", "per s", "")
_LEGEND = (
    "batch: micro-batch x accumulation. peak: reserved, of what is usable. not kept: "
    "blocks whose activations are recomputed or offloaded. per s: samples, estimated; "
    "against the slowest that fits."
)
_SEVERAL_LEGEND = (
    " x2: so many cards, x8x4: on four nodes; batch and peak are those of each card."
)
_PRICED = ("per hour", "samples per 1.00")
_PRICED_LEGEND = (
    "samples per 1.00: for that much money, at the price per hour that was given."
)


def compare_text(
    rows: Sequence[GpuComparison], model: ModelSummary, samples: int | None = None
) -> RenderableType:
    """Render the comparison, rows in their order; ``samples``: of an epoch."""
    slowest = min((_speed(row) for row in rows if row.fits), default=0.0)
    methods = list(dict.fromkeys(row.method for row in rows))
    several = len(methods) > 1
    columns, legend = [*_COLUMNS], _LEGEND
    groups = any(row.gpus > 1 for row in rows)
    if groups:
        legend += _SEVERAL_LEGEND
        columns.append("engine")
    if samples is not None:
        columns.append("time")
        legend += f" time: of one pass over {samples:,} samples."
    body = [
        (
            *((row.name, row.method) if several else (row.name,)),
            *_line(row, slowest),
            *((_engine(row),) if groups else ()),
            *((_time(row, samples),) if samples is not None else ()),
        )
        for row in rows
    ]
    names = ("card", "method") if several else ("card",)
    left = (*range(len(names) + 1), len(names) + 2)
    question = "WHICH CARD AND METHOD" if several else "WHICH CARD"
    parts = [
        lines([*model_lines(model), ""]),
        section(question, lines(_answers(rows, methods))),
        table((*names, *columns), body, left=left),
        Text(legend, style="dim"),
    ]
    if any(row.price_per_hour is not None for row in rows):
        parts += [Text(""), *_prices(rows, samples, several=several)]
    said = [text for row in rows for text in (row.problem, *row.warnings) if text]
    if said:
        parts += [Text(""), bullets(dict.fromkeys(said))]
    return Group(*parts)


def _answers(rows: Sequence[GpuComparison], methods: Sequence[str]) -> list[str]:
    if len(methods) == 1:
        return [*_answer(rows), *_cheapest(rows)]
    of_each = {
        method: [row for row in rows if row.method == method] for method in methods
    }
    return [
        f"{method}: {' '.join([*_answer(of), *_cheapest(of)])}"
        for method, of in of_each.items()
    ]


def _answer(rows: Sequence[GpuComparison]) -> list[str]:
    """State which GPU is needed for one method."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        needs = [row.estimate for row in rows if row.estimate is not None]
        if not needs:
            return ["None of these cards can run what was asked for."]
        least = format_bytes(min(estimate.reserved_bytes for estimate in needs))
        where = "It does not fit" if len(rows) == 1 else "It fits on none of these"
        return [f"{where}: at least {least} are needed."]
    if len(rows) == 1:
        return [f"It fits: {rate_text(_speed(rows[0]))} samples/s."]
    smallest = min(fitting, key=lambda row: row.gpus * row.gpu.total_bytes)
    fastest = max(fitting, key=_speed)
    if smallest is fastest:
        return [f"{smallest.name}: the smallest that fits, and the fastest."]
    ratio = _speed(fastest) / _speed(smallest)
    return [
        f"{smallest.name} is the smallest that fits.",
        f"{fastest.name} is the fastest: {ratio:.3g} times as fast.",
    ]


def _cheapest(rows: Sequence[GpuComparison]) -> list[str]:
    """Name the GPU with the most samples per unit of money, for one method."""
    rates = [(row.samples_per_money, row) for row in rows if row.fits]
    priced = [(rate, row) for rate, row in rates if rate is not None]
    if len(rows) == 1 or not priced:
        return []
    # Of equally cheap ones the fastest.
    rate, best = max(priced, key=lambda pair: (pair[0], _speed(pair[1])))
    among = "" if len(priced) == len(rates) else " of those with a price"
    return [f"{best.name} is the cheapest{among}: {rate_text(rate)} samples per 1.00."]


def _prices(
    rows: Sequence[GpuComparison], samples: int | None, *, several: bool
) -> list[RenderableType]:
    """Return a table of prices and what they buy, and its legend.

    ``samples``: per epoch, to show their cost; ``several``: there are several methods.
    """
    names = ("card", "method") if several else ("card",)
    columns, legend = [*names, *_PRICED], _PRICED_LEGEND
    if samples is not None:
        columns.append("cost")
        legend += f" cost: of one pass over {samples:,} samples."
    body = [
        (
            *((row.name, row.method) if several else (row.name,)),
            _or_dash(row.price_per_hour, money_text),
            _or_dash(row.samples_per_money, rate_text),
            *(() if samples is None else (_or_dash(row.cost(samples), money_text),)),
        )
        for row in rows
    ]
    return [table(columns, body, left=range(len(names))), Text(legend, style="dim")]


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _speed(row: GpuComparison) -> float:
    return row.estimate.samples_per_s_of_data if row.estimate is not None else 0.0


def _line(row: GpuComparison, slowest: float) -> tuple[str, ...]:
    usable = f"of {row.budget.usable_bytes / GIB:.2f}"
    if row.estimate is None:
        return ("no", "-", "-", f"- {usable}", "-", "-", "")
    recipe = row.estimate.recipe
    fits = row.fits
    return (
        "yes" if fits else "no",
        f"{recipe.batch_size} x {recipe.gradient_accumulation_steps}",
        recipe.precision,
        f"{row.estimate.reserved_bytes / GIB:.2f} {usable}",
        f"{len(recipe.wrapped_blocks)} of {row.blocks}",
        rate_text(_speed(row)) if fits else "-",
        f"{_speed(row) / slowest:.3g}x" if fits else "",
    )


def _engine(row: GpuComparison) -> str:
    parallelism = row.estimate.recipe.parallelism if row.estimate is not None else None
    return "-" if parallelism is None else parallelism.engine


def _time(row: GpuComparison, samples: int) -> str:
    if row.estimate is None or not row.fits:
        return "-"
    return hours_text(row.estimate.hours(samples))
