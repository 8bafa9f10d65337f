"""The map of the code is that of the code."""

import re
from pathlib import Path

import pytest

from docs import draw_architecture

ROOT = Path(__file__).parents[2]
_PATH = re.compile(r"`((?:budgetfit/)?[a-z_]+/(?:[a-z_]+/)*(?:[a-z_]+\.(?:py|toml))?)`")


def test_the_picture_shows_the_folders_and_their_imports() -> None:
    drawn = draw_architecture.draw()
    assert drawn == draw_architecture.PICTURE.read_text(encoding="utf-8"), (
        "Draw it again: python docs/draw_architecture.py"
    )
    folders = {path.parent.name for path in ROOT.glob("budgetfit/*/__init__.py")}
    assert folders <= set(re.findall(r"<text [^>]*>(\w+)</text>", drawn))


def test_every_arrow_points_down() -> None:
    level = {
        name: number
        for number, row in enumerate(draw_architecture.layers())
        for name in row
    }
    assert all(level[a] < level[b] for a, b in draw_architecture.imports())


@pytest.mark.parametrize("page", ["architecture.md", "contributing.md"])
def test_every_path_on_the_page_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    paths = _PATH.findall(text)
    assert paths
    homes = (ROOT, ROOT / "budgetfit")
    missing = [
        path for path in paths if not any((home / path).exists() for home in homes)
    ]
    assert not missing


def test_every_folder_says_which_file_to_open_first() -> None:
    for init in ROOT.glob("budgetfit/**/__init__.py"):
        if init.parent.name == "budgetfit":
            continue
        text = init.read_text(encoding="utf-8")
        named = re.findall(r"``([a-z0-9_/]+\.(?:py|toml))``", text)
        assert all((init.parent / name).exists() for name in named), init
        assert named or init.parent.name == "utils", init
