"""Compare what others measured and published with predictions; write docs/published.md.

python -m tests.accuracy.published.report            # print and write the page
python -m tests.accuracy.published.report --jobs 4
"""

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from budgetfit.utils.format_bytes import format_bytes
from docs.answers import write
from tests.accuracy.published import several_gpus
from tests.accuracy.published.context_ranges import section
from tests.accuracy.published.predict import Prediction, predict_with_sentence
from tests.accuracy.published.rows import rows

PAGE = Path(__file__).parents[3] / "docs" / "published.md"

INTRODUCTION = """# What others measured

Numbers that other projects published, against budgetfit's predictions: signed, above
zero means that budgetfit predicted too much. `make accuracy` makes this page from
`tests/accuracy/published/measurements.json`, where every row has its source. Nobody of
them measured for this comparison: versions, lengths and settings are partly unknown, so
each row is allowed what its unknowns allow, 5 % where its program can be rebuilt from
what its author published and 15 % where one or two things had to be assumed. The
programs are rebuilt in plain PyTorch (`tests/accuracy/published/programs.py`). Two
things in them were thought of only when a first version missed: torch 1.10 kept
gradients through `zero_grad()` (transformers' rows), and a benchmark that repeats keeps
those of the repetition before (Liger's). Predictions stand for the installed torch.

*allocated* is PyTorch's peak of allocated bytes, *reserved* its peak of reserved bytes,
*process* what nvidia-smi shows; the process rows use the CUDA context that their author
measured. A row that ended out of memory is met by the verdict that it does not fit.
"""


def compared(jobs: int) -> list[tuple[Prediction, str]]:
    """Every row's prediction, and a sentence where it misses."""
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(predict_with_sentence, rows()))


def page(found: list[tuple[Prediction, str]]) -> str:
    """The whole page."""
    predicted = [row for row, _ in found if row.reason is None]
    missed = [
        (row, text) for row, text in found if row.reason is None and not row.holds
    ]
    return "\n".join(
        [
            INTRODUCTION,
            _summary(predicted, len(found)),
            f"\n## Rows that miss what they are allowed ({len(missed)})\n",
            *(
                f"* **{row.row.label}** ({row.row.group}), {_error(row)}: {text}"
                for row, text in missed
            ),
            "\n## Every predicted row\n",
            _table(predicted),
            f"\n## Rows without a prediction ({len(found) - len(predicted)})\n",
            _reasons([row for row, _ in found if row.reason is not None]),
            "",
            section(),
            "",
        ]
    )


def _summary(predicted: list[Prediction], total: int) -> str:
    numbers = [row for row in predicted if row.error is not None]
    verdicts = [row for row in predicted if row.error is None]
    counts = f"{len(numbers)} numbers and {len(verdicts)} verdicts predicted"
    lines = [
        f"{total} rows: {counts}, {total - len(predicted)} not.\n",
        "| | rows | median of sizes | median | lowest | highest | as allowed |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for row in numbers:
        groups[f"**{row.row.footprint}**"].append(row)
    for row in numbers:
        groups[f"{row.row.group}, {row.row.footprint}"].append(row)
    for title, members in groups.items():
        errors = [row.error for row in members if row.error is not None]
        lines.append(
            f"| {title} | {len(errors)} | {statistics.median(map(abs, errors)):.2%} | "
            f"{statistics.median(errors):+.2%} | {min(errors):+.2%} | "
            f"{max(errors):+.2%} | {sum(row.holds for row in members)} |"
        )
    right = sum(row.holds for row in verdicts)
    lines.append(f"| out of memory | {len(verdicts)} | | | | | {right} |")
    return "\n".join(lines)


def _error(row: Prediction) -> str:
    if row.error is None:
        return "fits" if row.fits else "does not fit"
    return f"{row.error:+.2%}"


def _table(predicted: list[Prediction]) -> str:
    lines = [
        (
            "| row | card | settings | footprint | published | predicted | error | "
            "allowed |"
        ),
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for row in predicted:
        facts = row.row
        settings = facts.settings + (f"; assumed: {row.assumed}" if row.assumed else "")
        card = facts.card or "not stated"
        lines.append(
            f"| {_named(row)} | {card} | {settings} | {facts.footprint} | "
            f"{facts.published or 'out of memory'} | {format_bytes(row.bytes)} | "
            f"{_error(row)} | {facts.within:.0%} |"
        )
    return "\n".join(lines)


def _named(row: Prediction) -> str:
    facts = row.row
    address, _, rest = facts.source.partition(" ")
    return f"{facts.label} ([{facts.group}]({address}){f' {rest}' if rest else ''})"


def _reasons(without: list[Prediction]) -> str:
    counts = Counter(row.reason for row in without)
    lines = ["| row | published | why |", "|---|---:|---|"]
    lines += [
        f"| {_named(row)} | {row.row.published or 'out of memory'} | {row.reason} |"
        for row in sorted(without, key=lambda row: -counts[row.reason])
    ]
    return "\n".join(lines)


def write_page(jobs: int = 2) -> str:
    """Write the page and return its summary, for printing."""
    text = page(compared(jobs))
    write(PAGE, f"{text}\n{several_gpus.section()}")
    head = text.removeprefix(INTRODUCTION).split("\n## Every predicted row")[0]
    process = section().split("\n\n")[1]
    return f"{head}\n\nProcess: {process}\nEvery row is in {PAGE.name}\n"


def main() -> int:
    """Print the summary and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    sys.stdout.write(write_page(parser.parse_args().jobs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
