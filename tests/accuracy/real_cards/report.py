"""Print predicted against measured memory of runs on real cards, bad ones first.

python -m tests.accuracy.real_cards.report          # and write the page's section
python -m tests.accuracy.real_cards.report --jobs 4
"""

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from docs.answers import write
from tests.accuracy.real_cards.predict import Compared, compare
from tests.accuracy.real_cards.runs import runs

PAGE = Path(__file__).parents[3] / "docs" / "accuracy.md"
HEADING = "## On a real card"
# Median and worst in percent of what was measured.
TARGETS = {"allocated": (0.05, 1.2), "reserved": (1.0, 3.0)}
TEXT = f"""{HEADING}

Made by `python -m tests.accuracy.real_cards.report`. Others measured {{count}} runs of
LoRA and QLoRA on a Tesla T4 (fitcheck-llm 0.3.1, MIT; torch 2.10 and 2.14, transformers
5.0 and 5.17). `tests/accuracy/real_cards/t4_runs.json` has every figure, and the
program in words. The same program is traced here, with the libraries that are
installed. Nothing was fitted to these rows.

* Base in fp16: the memory of every phase is predicted, eager attention included, whose
  reserved memory was 4 to 9 % too low before segments had the addresses of a real
  driver ([0042](decisions/0042-loading-and-addresses.md)).
* Base in nf4: the runs loaded it in another way than the libraries that are installed,
  and no two runs alike. Up to transformers 5.3 threads copy weights in 16 bits onto the
  card ahead of their quantisation, as far as the host gets; peft before 0.20 keeps what
  they leave cached. "With threads" is the least and the most that is reserved with a
  constant lead of 0 to all weights, a wide range: {{explained}} of {{quantized}} rows
  are in it. The decision has what else tells that this is the cause.
* From transformers 5.4 on weights are quantised one by one: that is what is predicted.
"""


def section(compared: Sequence[Compared]) -> str:
    """The section of the page."""
    worst_first = sorted(
        compared,
        key=lambda row: -max(abs(row.reserved_error), abs(row.allocated_error)),
    )
    threaded = [row.threads_explain for row in compared if row.threads_mib]
    text = TEXT.format(
        count=len(compared), explained=sum(threaded), quantized=len(threaded)
    )
    return "\n".join(
        [
            text,
            _summary(compared),
            "\n### Every run, the worst first\n",
            _table(worst_first),
        ]
    )


def _summary(compared: Sequence[Compared]) -> str:
    lines = [
        "| | runs | median of sizes | lowest | highest | under by over 3 % | target |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    groups = {"all": list(compared)}
    for row in compared:
        run = row.run
        stored = run.quantization or "fp16"
        groups.setdefault(f"{run.attention}, base in {stored}", []).append(row)
    for title, rows in groups.items():
        for figure, (median, worst) in TARGETS.items():
            errors = [100 * getattr(row, f"{figure}_error") for row in rows]
            under = sum(error < -3.0 for error in errors)
            wanted = f"{median} %, worst {worst} %" if title == "all" else ""
            lines.append(
                f"| {title}: {figure} | {len(rows)} | "
                f"{statistics.median(map(abs, errors)):.3f} % | {min(errors):+.2f} % | "
                f"{max(errors):+.2f} % | {under} | {wanted} |"
            )
    return "\n".join(lines)


def _table(rows: Sequence[Compared]) -> str:
    lines = [
        (
            "| model | attention | batch x length | base | torch | allocated MiB | "
            "predicted | error | reserved MiB | predicted | error | with threads | "
            "forward, backward, optimizer |"
        ),
        "|---|---|---|---|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        run = row.run
        torch = re.search(r"torch (\d+\.\d+)", run.stack)
        threads = row.threads_mib
        span = f"{min(threads):,.0f} to {max(threads):,.0f}" if threads else ""
        phases = ", ".join(f"{100 * error:+.2f} %" for error in row.phase_errors)
        lines.append(
            f"| {run.model.rpartition('/')[2]} | {run.attention} | "
            f"{run.batch_size} x {run.length} | {run.quantization or 'fp16'} | "
            f"{torch[1] if torch else ''} | {run.allocated_mib:,.1f} | "
            f"{row.allocated_mib:,.1f} | {100 * row.allocated_error:+.2f} % | "
            f"{run.reserved_mib:,.0f} | {row.reserved_mib:,.0f} | "
            f"{100 * row.reserved_error:+.2f} % | {span} | {phases} |"
        )
    return "\n".join(lines)


def kept_section(page: str) -> str:
    """The section as it is in the page; empty where there is none."""
    found = re.search(rf"{HEADING}\n.*?(?=\n## |\Z)", page, re.DOTALL)
    return found[0].rstrip() if found else ""


def main() -> int:
    """Print the section, and write it into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    with ProcessPoolExecutor(parser.parse_args().jobs) as pool:
        found = pool.map(partial(compare, threads=True), runs(), chunksize=4)
        text = section(list(found))
    page = PAGE.read_text(encoding="utf-8")
    write(PAGE, page.replace(kept_section(page), text, 1))
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
