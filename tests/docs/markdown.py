"""What a test needs of a page: its fenced blocks, its headings, its links."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^ {0,3}```(.*)$")
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    ``line`` is that of its first line of text, counted from 1; ``comment`` what the
    HTML comment directly above it says, if one is there.
    """

    page: str
    line: int
    language: str
    text: str
    comment: str = ""

    @property
    def not_run(self) -> str:
        """Why it is not run; empty where it is."""
        said = self.comment.partition("not run:")
        return "" if said[0] else said[2].strip()

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return README and every page under docs/, by their paths in the repository."""
    found = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [file.relative_to(ROOT).as_posix() for file in found]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, text: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page in their order.

    Raises:
        ValueError: A fence is not closed.
    """
    lines = (read(page) if text is None else text).split("\n")
    found: list[Block] = []
    start = None
    language = ""
    for number, line in enumerate(lines):
        match = _FENCE.match(line)
        if match is None:
            continue
        if start is None:
            start, language = number, match[1].strip()
            continue
        inner = "\n".join(lines[start + 1 : number]) + "\n"
        comment = _comment_above(lines[:start])
        found.append(Block(page, start + 2, language, inner, comment))
        start = None
    if start is not None:
        raise ValueError(f"{page}:{start + 1}: a fence is not closed")
    return found


def _comment_above(lines: list[str]) -> str:
    above = "\n".join(lines).rstrip()
    if not above.endswith("-->"):
        return ""
    return " ".join(_COMMENT.findall(above)[-1].split())


def prose(page: str) -> str:
    """Return a page without its fenced blocks and inline code."""
    kept, inside = [], False
    for line in read(page).split("\n"):
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return re.sub(r"`[^`\n]*`", "``", "\n".join(kept))


def links(page: str) -> list[str]:
    """Return the targets of all links of a page."""
    return links_in(prose(page))


def links_in(text: str) -> list[str]:
    """Return the targets of all links of a text."""
    return _LINK.findall(text)


def anchors(page: str) -> set[str]:
    """Return the ids that the site gives to a page's headings."""
    inside, found = False, set()
    for line in read(page).split("\n"):
        if _FENCE.match(line):
            inside = not inside
        elif not inside and (match := re.match(r"#{1,6}\s+(.*)$", line)):
            found.add(_slug(match[1]))
    return found


def _slug(title: str) -> str:
    """As the toc extension of Python-Markdown makes them."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    plain = re.sub(r"[^\w\s-]", "", plain.encode("ascii", "ignore").decode())
    return re.sub(r"[-\s]+", "-", plain.strip().lower())
