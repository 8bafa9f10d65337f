"""Print again what pages show: ``python -m tests.docs.print_again README.md``.

Each command of a ``console`` block is run as the tests run it, and as many paragraphs
of what it prints are written into the page as were there. Blocks with ``...`` are left
alone: what they leave out is somebody's choice.
"""

import sys

from tests.docs.markdown import ROOT, Block, blocks, read
from tests.docs.run_page import PROMPT, commands, print_of

PAGES = ("README.md", "docs/index.md", "docs/tutorial.md")


def main(pages: list[str]) -> None:
    """Rewrite these pages, or all that show what a command prints."""
    for page in pages or PAGES:
        text = read(page)
        for block in blocks(page):
            if block.language == "console" and "\n...\n" not in block.text:
                text = text.replace(block.text, printed_again(block), 1)
        (ROOT / page).write_text(text, encoding="utf-8")


def printed_again(block: Block) -> str:
    """Return a block with what its commands print now."""
    lines = []
    for command, shown in commands(block):
        lines.append(PROMPT + command)
        if shown:
            lines += first_paragraphs(print_of(block, command, fails=True), like=shown)
    return "\n".join(lines) + "\n"


def first_paragraphs(printed: str, *, like: str) -> list[str]:
    """Return the lines of the first paragraphs of a print, as many as ``like`` has."""
    count = like.strip("\n").count("\n\n") + 1
    paragraphs = printed.strip("\n").split("\n\n")[:count]
    return [line.rstrip() for line in "\n\n".join(paragraphs).split("\n")]


if __name__ == "__main__":
    main(sys.argv[1:])
