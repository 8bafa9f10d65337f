"""The site is whole without building it: its menu, its links, its references."""

import importlib.util
import re
import tomllib
from pathlib import PurePosixPath
from typing import Any

import pytest
import typer.main
import yaml

import budgetfit
from budgetfit.cli.app import app
from tests.docs.markdown import DOCS, ROOT, anchors, links, links_in, pages, read

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def hook() -> Any:
    """Return what makes the pages that are no files, as mkdocs loads it."""
    file = DOCS / "generate_reference.py"
    spec = importlib.util.spec_from_file_location("generate_reference", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaves(nav: object) -> list[str]:
    if isinstance(nav, list):
        return [leaf for item in nav for leaf in leaves(item)]
    if isinstance(nav, dict):
        return leaves(list(nav.values()))
    return [str(nav)]


def test_the_menu_names_every_page_once_and_no_other() -> None:
    made = hook()
    named = leaves(CONFIG["nav"])
    files = [
        page.removeprefix("docs/")
        for page in pages()
        if page.startswith("docs/") and not page.startswith("docs/decisions/")
    ]
    assert sorted(named) == sorted([*files, *made.GENERATED])


def test_the_decisions_come_into_the_menu_by_themselves() -> None:
    made = hook()
    nav = made._replaced(CONFIG["nav"], "Decisions", ["a.md", "b.md"])
    listed = made.list_of_decisions()
    assert {"a.md", "b.md"} <= set(leaves(nav))
    assert len(made.decisions()) == len(list((DOCS / "decisions").glob("*.md")))
    assert all(f"]({file.name})" in listed for file in made.decisions())


@pytest.mark.parametrize("page", pages())
def test_every_link_inside_leads_to_a_page_and_a_heading_that_exist(page: str) -> None:
    site = hook()
    made = {f"docs/{path}" for path in (*site.GENERATED, *site.PICTURES)}
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = _from(page, path)
        if target in made:
            continue
        file = ROOT / target
        if not file.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", [page for page in pages() if page != "README.md"])
def test_pages_of_the_site_link_only_to_what_is_on_it(page: str) -> None:
    outside = [
        link
        for link in links(page)
        if not re.match(r"[a-z]+:|#", link)
        and not _from(page, link.partition("#")[0]).startswith("docs/")
    ]
    assert outside == []


def test_pages_that_are_made_link_only_to_pages_of_the_site() -> None:
    made = hook().GENERATED
    for page, make in made.items():
        for link in links_in(make()):
            target = _from(f"docs/{page}", link.partition("#")[0])
            assert (
                re.match(r"[a-z]+:", link)
                or target.removeprefix("docs/") in made
                or (target.startswith("docs/") and (ROOT / target).exists())
            ), f"{page}: {link}"


def _from(page: str, path: str) -> str:
    """Return where a relative path on a page leads, from the root."""
    parts: list[str] = []
    whole = PurePosixPath(page).parent / path if path else PurePosixPath(page)
    for part in whole.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def test_the_python_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: ([\w.]+)$", read("docs/reference/api.md"), re.MULTILINE)
    found = {}
    for path in named:
        module, _, name = path.rpartition(".")
        found[name] = getattr(importlib.import_module(module), name)
    for name in budgetfit.__all__:
        assert found[name] is getattr(budgetfit, name)


def test_the_reference_of_the_command_line_has_every_command_and_option() -> None:
    text = hook().command_line()
    command = typer.main.get_command(app)
    for name, sub in command.commands.items():
        assert f"## `budgetfit {name}`" in text
        for option in sub.params:
            for word in (*option.opts, *option.secondary_opts):
                assert (
                    option.param_type_name == "argument"
                    or not word.strip()
                    or f"`{word}" in text
                    or f", {word} " in text  # a second name
                )
    assert "..." not in "".join(re.findall(r"^\* `\w+`: .*", text, re.MULTILINE))


def test_the_page_on_the_command_line_names_every_option() -> None:
    text = read("docs/cli.md")
    command = typer.main.get_command(app)
    words = {
        word
        for sub in command.commands.values()
        for option in sub.params
        for word in (*option.opts, *option.secondary_opts)
        if word.startswith("--") and word != "--help"
    }
    missing = [word for word in words if not re.search(rf"{word}\b(?!-)", text)]
    assert sorted(missing) == []


def test_no_page_loads_anything_from_elsewhere() -> None:
    loaded = hook()._LOADED
    assert CONFIG["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript", "extra"} & set(CONFIG)
    assert loaded.search('<script src="https://cdn.example.org/a.js"></script>')
    assert loaded.search('<link rel="stylesheet" href="https://example.org/a.css">')
    assert not loaded.search('<script src="assets/a.js"></script>')
    assert not loaded.search('<link rel="canonical" href="https://example.org/">')
    assert not any(re.search(r"!\[[^\]]*\]\(https?:", read(page)) for page in pages())


def test_the_site_needs_only_what_the_docs_extra_and_the_constraints_name() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = extra["project"]["optional-dependencies"]["docs"]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name in wanted:
        assert f"\n{name.partition('[')[0]}==" in pinned
    assert [next(iter(p)) if isinstance(p, dict) else p for p in CONFIG["plugins"]] == [
        "search",
        "mkdocstrings",
    ]
