"""Draw ``docs/architecture.svg``: the folders of the package and what imports what.

    python docs/draw_architecture.py

Rows are the layers of ``.importlinter``, which ``make lint`` holds the imports to. An
arrow stands for an import that no longer way through other folders implies.
"""

import configparser
import textwrap
from html import escape
from pathlib import Path
from typing import Final

import grimp
import networkx as nx

ROOT: Final = Path(__file__).parents[1]
PICTURE: Final = ROOT / "docs" / "architecture.svg"
WIDTH: Final = 1080
BOX_HEIGHT: Final = 56
ROW_HEIGHT: Final = 90
MOST_LINES: Final = 2  # of a purpose
LEFT_OUT: Final = {"__main__"}

_STYLE = """
    text { font: 14px system-ui, sans-serif; fill: #16302d; }
    .what { font-size: 10.5px; fill: #46605c; }
    rect { fill: #e3f3f0; stroke: #00897b; }
    path { fill: none; stroke: #9db8b4; marker-end: url(#head); }
    .page { fill: #ffffff; stroke: none; }
"""

_ARROW_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
    ' markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z"'
    ' style="fill:#9db8b4;stroke:none;marker-end:none"/></marker></defs>'
)


def layers() -> list[list[str]]:
    """Return the folders of each layer, the highest layer first."""
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    rows = config["importlinter:contract:budgetfit"]["layers"].strip().splitlines()
    named = [[name.strip() for name in row.split("|")] for row in rows]
    kept = [[name for name in row if name not in LEFT_OUT] for row in named]
    return [row for row in kept if row]


def imports() -> list[tuple[str, str]]:
    """Return which folder imports which, without what follows from other pairs."""
    modules = grimp.build_graph("budgetfit", cache_dir=None)
    folders = nx.DiGraph()
    for folder in modules.find_children("budgetfit"):
        name = folder.removeprefix("budgetfit.")
        folders.add_node(name)
        for module in {folder, *modules.find_descendants(folder)}:
            for found in modules.find_modules_directly_imported_by(module):
                other = (*found.split("."), "")[1]
                if other not in {name, ""}:
                    folders.add_edge(name, other)
    pairs = nx.transitive_reduction(folders).edges
    return sorted(pair for pair in pairs if not LEFT_OUT & set(pair))


def purpose(folder: str) -> str:
    """Return the first clause of a folder's docstring, in plain text."""
    path = ROOT / "budgetfit" / folder / "__init__.py"
    if not path.exists():
        path = path.parent.with_suffix(".py")
    first = path.read_text(encoding="utf-8").split("\n", 1)[0].strip('". ')
    clause = first.split(": ")[-1 if first.startswith("``") else 0]
    clause = clause.split(". ")[0].replace("``", "")
    return clause[0].upper() + clause[1:]


def draw() -> str:
    """Return the picture."""
    rows = layers()
    box: dict[str, tuple[float, float, float]] = {}
    for number, row in enumerate(rows):
        width = min(400, (WIDTH - 20) / len(row) - 20)
        gap = (WIDTH - width * len(row)) / (len(row) + 1)
        for place, name in enumerate(row):
            box[name] = gap + place * (width + gap), 20 + number * ROW_HEIGHT, width
    height = 20 + len(rows) * ROW_HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        "<title>The folders of budgetfit, and which imports which</title>",
        f"<style>{_STYLE}</style>",
        _ARROW_HEAD,
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
    ]
    for upper, lower in imports():
        (x1, y1, w1), (x2, y2, w2) = box[upper], box[lower]
        start, end = (x1 + w1 / 2, y1 + BOX_HEIGHT), (x2 + w2 / 2, y2)
        bend = (end[1] - start[1]) / 2
        lines.append(
            f'<path d="M{start[0]:.0f} {start[1]:.0f} C{start[0]:.0f} '
            f"{start[1] + bend:.0f} {end[0]:.0f} {end[1] - bend:.0f} "
            f'{end[0]:.0f} {end[1] - 2:.0f}"/>'
        )
    for name, (x, y, width) in box.items():
        place = f'x="{x:.0f}" y="{y}"'
        middle = f'x="{x + width / 2:.0f}" text-anchor="middle"'
        lines += [
            f'<rect {place} width="{width:.0f}" height="{BOX_HEIGHT}" rx="6"/>',
            f'<text {middle} y="{y + 19}">{name}</text>',
        ]
        shown = textwrap.wrap(
            purpose(name), int(width / 6), max_lines=MOST_LINES, placeholder=" …"
        )
        lines += [
            f'<text class="what" {middle} y="{below}">{escape(line)}</text>'
            for below, line in zip((y + 34, y + 47), shown, strict=False)
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
