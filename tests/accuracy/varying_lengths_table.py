"""The table of trainings on samples of many lengths, of ``varying_lengths.jsonl``.

python -m tests.accuracy.varying_lengths_table    # print the section of accuracy.md
"""

import json
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

ROWS: Final = Path(__file__).with_name("varying_lengths.jsonl")
REMEDIES: Final = Path(__file__).with_name("varying_lengths_remedies.jsonl")
_HEADER: Final = """\
| model | lengths | batch x accumulation | what keeps it within | rate | trainings | \
out of memory | cache emptied | most reserved, of predicted | of the limit |
|---|---|---|---|---:|---:|---:|---:|---:|---:|"""

_OF_REMEDIES: Final = """\
| model | lengths | batch | what keeps it within | plan, samples/s | {} | of the best |
|---|---|---:|---|---:|{}---:|"""


def rows() -> list[dict[str, Any]]:
    """Return the trainings; of a plan that has changed since, the latest one's."""
    return _latest(ROWS, "origin", "gpu", "model", "lengths", "seed")


def _latest(path: Path, *key: str) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return list({tuple(row[name] for name in key): row for row in lines}.values())


def section() -> str:
    """The section of docs/accuracy.md: a line for each model and distribution."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows():
        groups[row["origin"], row["model"], row["lengths"]].append(row)
    every = [row for group in groups.values() for row in group]
    updates = {row["updates"] for row in every}
    on_card = sum(row["origin"] == "gpu" for row in every)
    text = (
        f"{len(every)} trainings of {min(updates)} updates, {on_card} of them on a "
        "real H100 with torch 2.11, the others on the null driver, memory limited to "
        "what was planned (0.55 of what keeping everything takes at batch 16), batches "
        "padded to the longest of random samples: "
        f"{sum(row['out_of_memory'] for row in every)} ran out of memory, "
        f"{sum(row['emptied_cache'] > 0 for row in every)} emptied the cache. The rate "
        "is that of the plan's own times over these lengths, of that of the fastest "
        "settings for the longest batch alone, which may not fit. Made by `python -m "
        "tests.accuracy.varying_lengths`, whose rows are in `varying_lengths.jsonl`; "
        "`python -m tests.accuracy.varying_lengths_table` prints this."
    )
    return "\n".join(
        [
            "## Samples of many lengths\n",
            *textwrap.wrap(text, 88, break_long_words=False, break_on_hyphens=False),
            "",
            _HEADER,
            *map(_line, groups.values()),
            *_against_remedies(),
        ]
    )


def _against_remedies() -> list[str]:
    """Return a table of plans against the best remedy, the slowest first."""
    compared = sorted(_latest(REMEDIES, "gpu", "model", "lengths"), key=_of_the_best)
    if not compared:
        return []
    seconds = [row["seconds"] - row["plan_seconds"] for row in compared]
    text = (
        f"The {len(compared)} plans of the null driver against each remedy alone, all "
        "judged over the same replays: the longest batch first, expandable segments "
        "and padding with the fastest settings for the longest batch alone; less kept "
        "at that batch size; and another batch size, where it could be faster than "
        f"those. 0 does not fit. The slowest plan has {_of_the_best(compared[0]):.1%} "
        "of the best. `python -m tests.accuracy.varying_lengths_remedies` compares "
        f"them, without a GPU, in {min(seconds):.0f} to {max(seconds):.0f} processor "
        "seconds each beside the plan."
    )
    names = list(compared[0]["remedies"])
    return [
        "",
        *textwrap.wrap(text, 88, break_long_words=False, break_on_hyphens=False),
        "",
        _OF_REMEDIES.format(" | ".join(names), "---:|" * len(names)),
        *map(_compared, compared),
    ]


def _of_the_best(row: dict[str, Any]) -> float:
    """The plan's rate, of that of the fastest remedy; 0 for one that does not fit."""
    rate = row["samples_per_s"] if row["fits"] else 0.0
    best = max(row["remedies"].values()) or rate
    return float(rate / best) if best else 0.0


def _compared(row: dict[str, Any]) -> str:
    cells = (
        row["model"],
        row["lengths"],
        row["batch_size"],
        _measure(row),
        f"{row['samples_per_s']:.1f}",
        *(f"{rate:.1f}" if rate else "0" for rate in row["remedies"].values()),
        f"{_of_the_best(row):.1%}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def _measure(row: dict[str, Any]) -> str:
    if row["pad_to_multiple_of"]:
        return f"{row['measure']}, padded to {row['pad_to_multiple_of']}"
    return str(row["measure"])


def _line(group: list[dict[str, Any]]) -> str:
    """Return the line of one model and distribution."""
    one, most = group[0], max(row["reserved_bytes"] for row in group)
    cells = (
        f"{one['model']}, real {one['gpu']}"
        if one["origin"] == "gpu"
        else one["model"],
        one["lengths"],
        f"{one['batch_size']} x {one['gradient_accumulation_steps']}",
        _measure(one),
        f"{one['rate_share']:.1%}",
        len(group),
        sum(row["out_of_memory"] for row in group),
        sum(row["emptied_cache"] > 0 for row in group),
        f"{most / one['predicted_bytes']:.1%}",
        f"{most / one['limit_bytes']:.1%}",
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.stdout.write(f"{section()}\n")
