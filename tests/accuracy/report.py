"""Compare recordings with predictions and write the accuracy page of this torch.

    python -m tests.accuracy.report            # print the summary, write the page
    python -m tests.accuracy.report --jobs 4
    python -m tests.accuracy.report --compiled  # its section on torch.compile alone

Recordings of other releases of torch are compared where that release is installed.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from docs.answers import write
from tests.accuracy import allocator_settings, varying_lengths_table
from tests.accuracy.case import Case
from tests.accuracy.cases import CASES, RECORDINGS, release
from tests.accuracy.predict import Comparison, compare
from tests.accuracy.published.report import write_page

DOCS = Path(__file__).parents[2] / "docs"
FEW_BLOCKS = 3 * 512  # bytes
MAIN_RELEASE = "torch-2.13"  # the release of constraints.txt
# The last sections of its page, which other commands make.
OTHERS = ("## On a real card", "## Evaluation between training steps")


@dataclass(frozen=True)
class Result:
    """One recording: how it compares, or why it could not be predicted."""

    name: str
    origin: str
    versions: str
    case: Case
    compared: Comparison | None
    reason: str = ""


def result_of(path: Path) -> Result:
    """Predict one recording; a failure is a row of the table too."""
    recording = json.loads(path.read_text(encoding="utf-8"))
    software = recording["software"]
    versions = f"torch {software['torch']}, transformers {software['transformers']}"
    if software["cudnn_enabled"]:
        versions += f", cuDNN {software['cudnn_version']}"
    case, origin = CASES[recording["name"]], recording["origin"]
    try:
        compared = compare(case, recording)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Result(path.stem, origin, versions, case, None, reason)
    return Result(path.stem, origin, versions, case, compared)


# -- groups ---------------------------------------------------------------------------


def _attention(case: Case) -> str:
    """Which kernels, and whether padding is masked."""
    kernel = case.attention or "torch's choice"
    if case.model.settings.get("attn_implementation") == "eager":
        kernel = "eager"
    masked = any(wanted.padding for wanted in case.model.inputs)
    return f"{kernel}, padding masked" if masked else kernel


def _path(case: Case) -> str:
    """What is special about the allocator's way."""
    if case.runs_out:
        return "cache emptied to go on"
    if case.last_batch_size:
        return "smaller last batch, then a full one"
    return "expandable segments" if case.allocator else "plain"


GROUPS: dict[str, Callable[[Case], str]] = {
    "model": lambda case: case.model.name,
    "precision": lambda case: case.precision,
    "checkpointing": lambda case: case.checkpointing,
    "optimizer": lambda case: case.optimizer,
    "accumulation": lambda case: str(case.gradient_accumulation_steps),
    "card": lambda case: case.gpu,
    "attention": _attention,
    "allocator": _path,
}
FIGURES: dict[str, Callable[[Comparison], float]] = {
    "allocated": lambda row: row.allocated_error,
    "reserved": lambda row: row.reserved_error,
    "chain formula against the judge": lambda row: row.formula_error,
}
# What the figures have to reach: median and worst, in percent of the recorded value.
TARGETS = {
    ("null driver", "allocated"): (0.05, 0.5),
    ("null driver", "reserved"): (0.5, 3.0),
    ("gpu", "allocated"): (0.3, 1.0),
    ("gpu", "reserved"): (1.5, 5.0),
}
FORMULA_WITHIN = 0.01
MOST_UNDER = 0.01  # who is told too little runs out of memory
# Inductor's layouts of convolutions without cuDNN are not those of the trace; per cent.
COMPILED_CONVOLUTIONS = {"resnet-50": (1.2, 3.0), "convnext-tiny": (0.5, 6.0)}


def beyond_bounds(found: Comparison, origin: str) -> list[str]:
    """Say in what a case is not predicted as well as every case has to be."""
    allocated, reserved = (
        TARGETS[origin, "allocated"][1],
        TARGETS[origin, "reserved"][1],
    )
    if found.case.compile:
        allocated, reserved = COMPILED_CONVOLUTIONS.get(
            found.case.family, (allocated, reserved)
        )
    holds = {
        "allocated": abs(found.allocated_error) <= allocated / 100,
        "reserved": -MOST_UNDER <= found.reserved_error <= reserved / 100,
        "retries": found.predicted_retries == found.recorded_retries,
        "formula": abs(found.formula_error) <= FORMULA_WITHIN,
    }
    return [figure for figure, within in holds.items() if not within]


# -- text -----------------------------------------------------------------------------

HEADER = (
    "| | cases | median | lowest | highest | under | under by over 1 % |\n"
    "|---|---:|---:|---:|---:|---:|---:|"
)


def _percent(value: float) -> str:
    return f"{100 * value:+.3f} %"


def _summary(title: str, errors: list[float]) -> str:
    under = sum(error < 0 for error in errors) / len(errors)
    far = sum(error < -0.01 for error in errors)
    return (
        f"| {title} | {len(errors)} | {_percent(statistics.median(errors))} | "
        f"{_percent(min(errors))} | {_percent(max(errors))} | "
        f"{100 * under:.0f} % | {far} |"
    )


def _target(origin: str, figure: str, errors: list[float]) -> str:
    median, worst = TARGETS[origin, figure]
    found = 100 * abs(statistics.median(errors)), 100 * max(map(abs, errors))
    reached = "reached" if found[0] <= median and found[1] <= worst else "MISSED"
    return (
        f"* {figure}: median {found[0]:.3f} % (target {median} %), worst "
        f"{found[1]:.3f} % (target {worst} %): {reached}"
    )


def _table(rows: Iterable[tuple[str, Comparison]]) -> str:
    lines = [
        (
            "| case | allocated | predicted | error | reserved | predicted | error | "
            "cache emptied |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    worst_first = sorted(
        rows,
        key=lambda row: -max(abs(row[1].allocated_error), abs(row[1].reserved_error)),
    )
    for name, row in worst_first:
        retries = f"{row.recorded_retries}, predicted {row.predicted_retries}"
        lines.append(
            f"| {name} | {row.recorded_allocated:,} | {row.predicted_allocated:,} | "
            f"{_percent(row.allocated_error)} | {row.recorded_reserved:,} | "
            f"{row.predicted_reserved:,} | {_percent(row.reserved_error)} | "
            f"{retries if row.recorded_retries or row.predicted_retries else ''} |"
        )
    return "\n".join(lines)


def section(origin: str, results: list[Result]) -> tuple[str, str]:
    """The summary and the tables of one origin; they are never mixed."""
    rows = [(row, row.compared) for row in results if row.compared is not None]
    missing = [row for row in results if row.compared is None]
    versions = "; ".join(sorted({row.versions for row in results}))
    parts = [f"## Recorded on: {origin}\n", f"{versions}.\n"]
    if missing:
        parts += [f"**{len(missing)} recordings could not be predicted:**\n"]
        parts += [f"* {row.name}: {row.reason}" for row in missing]
    if not rows:
        return "\n".join(parts), ""
    errors = {
        title: [figure(row) for _, row in rows] for title, figure in FIGURES.items()
    }
    parts += [
        _target(origin, figure, errors[figure])
        for of, figure in TARGETS
        if of == origin
    ]
    exact = {
        figure: sum(FIGURES[figure](row) == 0 for _, row in rows)
        for figure in ("allocated", "reserved")
    }
    close = sum(
        abs(row.predicted_allocated - row.recorded_allocated) <= FEW_BLOCKS
        for _, row in rows
    )
    equal = (
        f"* equal to the byte: reserved in {exact['reserved']} of {len(rows)}, "
        f"allocated in {exact['allocated']}; allocated within {FEW_BLOCKS} bytes in "
        f"{close} (`Run` keeps the loss that it reports)"
    )
    parts += [equal, "", HEADER]
    parts += [_summary(title, found) for title, found in errors.items()]
    tables = []
    for name, group in GROUPS.items():
        tables += [f"\n### By {name}\n", HEADER]
        by_value: dict[str, list[Comparison]] = defaultdict(list)
        for row, compared in rows:
            by_value[group(row.case)].append(compared)
        for value, members in sorted(by_value.items()):
            for figure in ("allocated", "reserved"):
                found = [FIGURES[figure](member) for member in members]
                tables.append(_summary(f"{value}, {figure}", found))
    tables += ["\n### Every case, the worst first\n"]
    tables += [_table((row.name, compared) for row, compared in rows)]
    return "\n".join(parts), "\n".join(tables)


COMPILED = "## With torch.compile"
_COMPILED_TEXT = """Recorded on the null driver as the others: the forward of each
block, or of the model, after a step that compiles and is dropped. What a process
compiled before may change the order of lines in generated code, and so single cases by
up to 1 %. Made by `python -m tests.accuracy.report --compiled`.
"""


def compiled_section(results: list[Result]) -> str:
    """The recordings under torch.compile, by what is compiled, and each of them."""
    rows = [(row, row.compared) for row in results if row.compared is not None]
    missing = [f"* {row.name}: {row.reason}" for row in results if row.compared is None]
    lines = []
    for mode, what in (("blocks", "each block"), ("model", "the model")):
        found = [compared for row, compared in rows if row.case.compile == mode]
        for figure in ("allocated", "reserved") if found else ():
            errors = [FIGURES[figure](compared) for compared in found]
            exact = sum(error == 0 for error in errors)
            title = f"{what}, {figure} ({exact} equal to the byte)"
            lines.append(_summary(title, errors))
    return "\n".join(
        [
            f"{COMPILED}\n",
            _COMPILED_TEXT,
            *missing,
            HEADER,
            *lines,
            "\n### Every compiled case, the worst first\n",
            _table((row.name, compared) for row, compared in rows),
        ]
    )


def with_compiled(page: str, section: str) -> str:
    """The page with its section on torch.compile replaced, or put before the next.

    >>> with_compiled("a\\n\\n## Allocator settings\\n", "## With torch.compile")
    'a\\n\\n## With torch.compile\\n\\n## Allocator settings\\n'
    """
    before, _, old = page.partition(COMPILED)
    rest = old.partition("\n## ")[2] if old else ""
    if not old:
        before, _, rest = page.partition("\n## Allocator settings")
        rest = f"Allocator settings{rest}"
    return f"{before.rstrip()}\n\n{section}\n\n## {rest}"


INTRODUCTION = """# Accuracy{of_release}

Predicted against recorded peaks over three training steps, signed: above zero means
that budgetfit predicted too much, below that it predicted too little. `make accuracy`
makes this page from the recordings in `tests/accuracy/recordings`; each says on what it
was made. *Null driver* means PyTorch's own CUDA build, whose kernels were launched into
nothing: its allocations are real, no GPU ran. It knows no cuDNN, so convolutions,
recurrent layers and the default attention of H100 and B200 are recorded without it. The
prediction never sees the recording.

*Under* is the share of cases that were predicted too small by any amount.
"""

NOT_ON_A_GPU = """
No recording of a real GPU has been made with this release of torch. Those of an H100
are of torch 2.11: `python -m tests.accuracy.on_card` compares them."""


def page_of(installed: str) -> Path:
    """The page of a release: accuracy.md for the main one."""
    suffix = "" if installed == MAIN_RELEASE else f"-{installed}"
    return DOCS / f"accuracy{suffix}.md"


def of_other_commands(page: str) -> str:
    """The sections of a page that ``real_cards`` and ``evaluation.py`` make."""
    starts = [at for heading in OTHERS if (at := page.find(heading)) >= 0]
    return f"\n{page[min(starts) :].rstrip()}" if starts else ""


def outside(results: Iterable[Result]) -> int:
    """Print the cases that are not within their bounds; 1 where there is one."""
    failed = 0
    for row in results:
        wrong = (
            beyond_bounds(row.compared, row.origin) if row.compared else [row.reason]
        )
        if wrong:
            failed = 1
            sys.stdout.write(f"{row.name}: out of bounds: {', '.join(wrong)}\n")
    return failed


def main() -> int:
    """Print the summaries and write the page; 1 where a case is out of its bounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--compiled", action="store_true", help="that section alone")
    options = parser.parse_args()
    installed = release(torch.__version__)
    kind = "*compiled" if options.compiled else ""
    paths = sorted(RECORDINGS.glob(f"*/{installed}/{kind}*.json"))
    with ProcessPoolExecutor(options.jobs) as pool:
        results = list(pool.map(result_of, paths))
    page = page_of(installed)
    compiled = [row for row in results if row.case.compile]
    if options.compiled:
        made = compiled_section(compiled)
        sys.stdout.write(f"{made}\n")
        write(page, with_compiled(page.read_text("utf-8"), made))
        return outside(compiled)
    by_origin: dict[str, list[Result]] = defaultdict(list)
    for row in results:
        if not row.case.compile:
            by_origin[row.origin].append(row)
    of_release = "" if installed == MAIN_RELEASE else f" with {installed}"
    text = [INTRODUCTION.format(of_release=of_release)]
    for origin, rows in sorted(by_origin.items()):
        summary, tables = section(origin, rows)
        sys.stdout.write(f"{summary}\n\n")
        text += [summary, tables]
    if "gpu" not in by_origin:
        text += [NOT_ON_A_GPU]
    if compiled:
        text.append(f"\n{compiled_section(compiled)}")
    if installed == MAIN_RELEASE:
        text.append(f"\n{allocator_settings.section()}")
        text.append(f"\n{varying_lengths_table.section()}")
    if page.is_file() and (kept := of_other_commands(page.read_text("utf-8"))):
        text.append(kept)
    write(page, "\n".join(text) + "\n")
    sys.stdout.write(f"{len(results)} recordings; each of them is in {page.name}\n")
    if installed == MAIN_RELEASE:
        sys.stdout.write(write_page(options.jobs))
    return outside(results)


if __name__ == "__main__":
    sys.exit(main())
