"""The answer and the picture of each evidence page, from the page's own tables.

    python -m docs.answers                # all pages again, as they are in docs/
    python -m docs.answers zoo published  # some

Writers of pages call ``write`` with what they made.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from docs.evidence import (
    Errors,
    draw_errors,
    number,
    rows_after,
    sections,
    with_answers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS: Final = Path(__file__).parent
FAR: Final = 3.0  # percent


class Finished(NamedTuple):
    """A page and its picture, an SVG file."""

    page: str
    picture: str


def write(file: Path, page: str) -> None:
    """Write an evidence page, and the picture beside it.

    Raises:
        KeyError: It is none of ``PAGES``.
        ValueError: It lacks a heading or a table that its answer is made of.
    """
    finished = PAGES[file.stem](page, file.stem)
    file.with_suffix(".svg").write_text(f"{finished.picture}\n", encoding="utf-8")
    file.write_text(finished.page, encoding="utf-8")


def _shown(what: str, name: str) -> str:
    return f"![{what}]({name}.svg)"


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
    others = "" if exact == len(rows) else f" ({errors['reserved'].spread})"
    sentence = (
        f"**{len(rows)} training runs recorded with {how}: reserved memory is "
        f"predicted to the byte in {exact}**{others}; allocated: {errors['allocated'].spread}."
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


PAGES: Final[dict[str, Callable[[str, str], Finished]]] = {
    "accuracy": accuracy,
    "accuracy-torch-2.11": accuracy,
    "accuracy-torch-2.15": accuracy,
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
