"""The answer and the picture of each evidence page, from the page's own tables.

    python -m docs.answers                # all pages again, as they are in docs/
    python -m docs.answers zoo published  # some

Writers of pages call ``write`` with what they made.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from budgetfit.reporting.html.bars import Bar, bars
from budgetfit.reporting.html.svg import standalone
from docs.evidence import (
    Errors,
    cells,
    draw_errors,
    folded,
    number,
    rows_after,
    sections,
    with_answers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS: Final = Path(__file__).parent
FAR: Final = 3.0  # percent
MOST_NAMED: Final = 3  # failures in an answer


class Finished(NamedTuple):
    """A page and its picture, an SVG file."""

    page: str
    picture: str


def write(file: Path, page: str) -> None:
    """Write an evidence page, and the picture beside it.

    Raises:
        KeyError: It is none of ``PAGES``.
        ValueError: It lacks a heading or a table that its answer is made of; it is
            written without folds, so that no long run is lost.
    """
    file.write_text(page, encoding="utf-8")
    finished = PAGES[file.stem](page, file.stem)
    file.with_suffix(".svg").write_text(f"{finished.picture}\n", encoding="utf-8")
    file.write_text(finished.page, encoding="utf-8")


def _shown(what: str, name: str) -> str:
    return f"![{what}]({name}.svg)\n\n*{what}.*"


# -- accuracy -------------------------------------------------------------------------

_CASES: Final = "Every case, the worst first"
_RUNS: Final = "Every run, the worst first"
_REAL_CARD: Final = "## On a real card"


def accuracy(page: str, name: str) -> Finished:
    """Recorded training steps, and runs on a real card where the page has them."""
    groups: list[Errors] = []
    said: list[str] = []
    answers: dict[str, str] = {}
    for section in sections(page, "Recorded on: "):
        origin = section.split("\n", 1)[0].removeprefix("## Recorded on: ")
        errors, sentence = _recorded(section, origin)
        groups += errors
        said.append(sentence)
    for section in sections(page, _REAL_CARD.removeprefix("## ")):
        errors, sentence = _on_a_real_card(section)
        groups += errors
        said.append(sentence)
        answers[_REAL_CARD] = sentence
    label = "Signed errors of predicted memory, every case"
    title = page.split("\n", 1)[0]
    answers[title] = "\n\n".join([*said, _shown(label, name)])
    picture = draw_errors(label, groups, bad=f"predicted too low by over {FAR:g} %")
    return Finished(with_answers(page, answers), picture)


def _recorded(section: str, origin: str) -> tuple[list[Errors], str]:
    _, *rows = rows_after(section, _CASES)
    errors = {
        what: _memory_errors(
            f"{origin}: {what}",
            [100 * (number(row[at + 1]) / number(row[at]) - 1) for row in rows],
        )
        for what, at in (("reserved", 4), ("allocated", 1))
    }
    exact = sum(row[4] == row[5] for row in rows)
    how = (
        "PyTorch's CUDA build and no GPU" if origin == "null driver" else f"a {origin}"
    )
    reserved, allocated = errors["reserved"].spread, errors["allocated"].spread
    others = "" if exact == len(rows) else f" ({reserved})"
    sentence = (
        f"**{len(rows)} training runs recorded with {how}: reserved memory is "
        f"predicted to the byte in {exact}**{others}; allocated: {allocated}."
    )
    return list(errors.values()), sentence


def _on_a_real_card(section: str) -> tuple[list[Errors], str]:
    _, *rows = rows_after(section, _RUNS)
    reserved, allocated = (
        _memory_errors(f"real T4: {what}", [number(row[at]) for row in rows])
        for what, at in (("reserved", 10), ("allocated", 7))
    )
    sentence = (
        f"**{len(rows)} runs of LoRA and QLoRA that others measured on a Tesla T4: "
        f"reserved {reserved.spread}**, {sum(reserved.bad)} of them too low by over "
        f"{FAR:g} %; allocated {allocated.spread}."
    )
    return [reserved, allocated], sentence


def _memory_errors(name: str, percent: list[float]) -> Errors:
    return Errors(name, percent, [error < -FAR for error in percent])


# -- step times -----------------------------------------------------------------------


def times(page: str, name: str) -> Finished:
    """Published step times, on one GPU and on eight."""
    title, label = "# Step times", "Signed errors of predicted step times, every row"
    _, one, eight = rows_after(page, title)
    _, rows, signed, size, _, worst, _, inside = one
    said = (
        f"**{rows} published steps on one GPU: half of them are predicted within "
        f"{size} (signed median {signed}, worst {worst}); {inside} lie in the range "
        f"that a plan prints.** {eight[1]} steps on eight GPUs, whose communication is "
        f"not predicted: signed median {eight[2]}, worst {eight[5]}."
    )
    groups = _by_source(rows_after(page, "Every row of one GPU"))
    groups += _by_source(rows_after(page, "## Eight GPUs"), ", eight GPUs")
    picture = draw_errors(label, groups, bad="outside the range that a plan prints")
    answer = f"{said}\n\n{_shown(label, name)}"
    return Finished(with_answers(page, {title: answer}), picture)


def _by_source(table: list[list[str]], suffix: str = "") -> list[Errors]:
    """Return the errors of each source, the one with most rows first."""
    header, *rows = table
    source, inside = header.index("by"), header.index("in range")
    counted = Counter(row[source] for row in rows)
    members = {name: [row for row in rows if row[source] == name] for name in counted}
    return [
        Errors(
            f"{name}{suffix}",
            [number(row[0]) for row in members[name]],
            [row[inside] != "yes" for row in members[name]],
        )
        for name, _ in counted.most_common()
    ]


# -- published measurements -----------------------------------------------------------

_MISS: Final = re.compile(r"^\* \*\*(.+?)\*\* \((.+?)\), ", re.MULTILINE)
_SOURCE: Final = re.compile(r"(.*) \(\[(.*?)\]\(")


def published(page: str, name: str) -> Finished:
    """Memory that others measured, by what was measured and by source."""
    title = "# What others measured"
    label = "Signed errors of predicted memory, every published number"
    _, *rows = rows_after(page, "## Every predicted row")
    missed = set(_MISS.findall(page))
    groups: dict[str, tuple[list[float], list[bool]]] = {}
    for row in rows:
        found = _SOURCE.match(row[0])
        if found is None:
            raise ValueError(f"no source in {row[0]!r}")
        if row[6].endswith("%"):
            percent, bad = groups.setdefault(f"{found[2]}, {row[3]}", ([], []))
            percent.append(number(row[6]))
            bad.append(found.groups() in missed)
    errors = [Errors(group, *both) for group, both in groups.items()]
    counted = sum(len(group.percent) for group in errors)
    _, *summary = rows_after(page, title)
    by_kind = "; ".join(
        f"{row[0].strip('*')} ({row[1]}): median {row[3]}, from {row[4]} to {row[5]}"
        for row in summary
        if row[0].startswith("**")
    )
    _, *process = rows_after(page, "## Process: ")
    inside = sum(row[-1] != "outside" for row in process)
    said = (
        f"**Of {counted} published numbers and {len(rows) - counted} runs out of "
        f"memory, {len(rows) - len(missed)} are predicted within what their unknown "
        f"settings allow.** {by_kind}. Of {len(process)} reports of what a process "
        f"holds outside the allocator, {inside} lie in the range that is printed."
    )
    picture = draw_errors(label, errors, bad="outside what its unknown settings allow")
    answer = f"{said}\n\n{_shown(label, name)}"
    return Finished(with_answers(page, {title: answer}), picture)


# -- zoo ------------------------------------------------------------------------------

FEWEST: Final = 10  # models of a task that has a bar of its own
_FAILING: Final = "## Models that do not pass every stage"
_PASSING: Final = "## Models that pass every stage, by task"


def zoo(page: str, name: str) -> Finished:
    """Models by task; those that fail are not behind a fold."""
    header, *_ = rows_after(page, "\n\n")
    head = re.split(r"^(?=\| |## )", page, maxsplit=1, flags=re.MULTILINE)[0]
    rows = [
        row
        for line in page[len(head) :].splitlines()
        if line.startswith("| ")
        and (row := cells(line)) != header
        and set("".join(row)) != {"-"}
    ]
    failing = [row for row in rows if row[-1] or "no" in row[2:-1]]
    tasks: dict[str, list[list[str]]] = {}
    for row in sorted(rows, key=lambda row: (row[1], row[0])):
        tasks.setdefault(row[1], []).append(row)
    said = (
        f"**{len(rows) - len(failing)} of {len(rows)} models pass every stage: "
        f"{', '.join(header[2:-1])}.**"
    )
    said += "".join(f" Not {row[0]}: {row[-1]}." for row in failing[:MOST_NAMED])
    label = "Models of each task, and how many of them pass every stage"
    parts = [head.strip()]
    if failing:
        parts += [_FAILING, _table(header, failing)]
    parts.append(_PASSING)
    for task, members in tasks.items():
        passing = [row for row in members if row not in failing]
        if passing:
            parts.append(folded(f"{task}: {len(passing)}", _table(header, passing)))
    title = head.lstrip().split("\n", 1)[0]
    answer = f"{said}\n\n{_shown(label, name)}"
    return Finished(
        with_answers("\n\n".join(parts), {title: answer}),
        standalone(bars(label, _bars_of_tasks(tasks, failing))),
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bars_of_tasks(
    tasks: dict[str, list[list[str]]], failing: list[list[str]]
) -> list[Bar]:
    """Return a bar for what fails, for each task of many models, and for the others."""
    counts = {task: len(members) for task, members in tasks.items()}
    passing = Counter(
        row[1] for members in tasks.values() for row in members if row not in failing
    )
    many = sorted(
        (task for task in tasks if counts[task] >= FEWEST),
        key=lambda task: -counts[task],
    )
    few = [task for task in tasks if counts[task] < FEWEST]
    named = [(task, [task]) for task in many]
    named += [(f"{len(few)} other tasks", few)] if few else []
    fails = f"{len(failing)} of {sum(counts.values())}"
    return [
        Bar("fail at a stage", len(failing), fails, "limit"),
        *(
            Bar(
                title,
                passed := sum(passing[task] for task in of),
                f"{passed} of {sum(counts[task] for task in of)}",
                "accent",
            )
            for title, of in named
        ),
    ]


# -- performance ----------------------------------------------------------------------


def performance(page: str, name: str) -> Finished:
    """How long plans take, and how much faster they are than the usual practice."""
    title = "# Performance"
    header, *plans = rows_after(page, "## How long planning takes")
    at = next(at for at, what in enumerate(header) if what.startswith("answer"))
    seconds = sorted(number(row[at]) for row in plans)
    reached = sum(row[header.index("reached")] == "yes" for row in plans)
    header, *against = rows_after(page, "## Against every block recomputed")
    faster = header.index("faster by")
    against.sort(key=lambda row: number(row[faster]))
    gains = [number(row[faster]) for row in against]
    within = f"{reached} of {len(plans)} within their targets"
    least, middle, most = (
        f"{gain:+.1f} %" for gain in (gains[0], statistics.median(gains), gains[-1])
    )
    said = (
        f"**Plans of {len(plans)} models are there after {seconds[0]:.1f} to "
        f"{seconds[-1]:.1f} s (median {statistics.median(seconds):.1f} s; {within}). "
        f"By predicted times they are {least} to {most} (median {middle}) faster than "
        "every block recomputed at the largest batch that fits; slower in "
        f"{sum(gain < 0 for gain in gains)} of {len(gains)} cases.**"
    )
    label = "How much faster a plan is than every block recomputed, the least first"
    shown = [
        Bar(
            ", ".join(row[:3]),
            max(0.0, number(row[faster])),
            row[faster],
            "limit" if number(row[faster]) < 0 else "accent",
        )
        for row in against
    ]
    answer = f"{said}\n\n{_shown(label, name)}"
    done = with_answers(page, {title: answer})
    return Finished(done, standalone(bars(label, shown)))


PAGES: Final[dict[str, Callable[[str, str], Finished]]] = {
    "accuracy": accuracy,
    "accuracy-torch-2.11": accuracy,
    "accuracy-torch-2.15": accuracy,
    "times": times,
    "published": published,
    "zoo": zoo,
    "performance": performance,
}


def main(names: list[str]) -> int:
    """Write the named pages again, or all."""
    if unknown := [name for name in names if name not in PAGES]:
        print(f"{unknown[0]!r} is no evidence page. They are: {', '.join(PAGES)}.")
        return 2
    for name in names or PAGES:
        file = DOCS / f"{name}.md"
        write(file, file.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
