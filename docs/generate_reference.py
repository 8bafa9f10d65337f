"""What the site has beyond the folder: made while mkdocs builds it, so never stale.

The command line's reference (from typer), the list of decisions, the changelog, and
the report and a figure of a plan.
mkdocs calls the functions by their names; it is imported by them alone, so that tests
can read ``GENERATED`` without it.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions"
# A page may load what lies beside it and nothing else: no fonts, no scripts of others.
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(https?:)?//[^\"'> ]+"
    r"|<link[^>]*rel=[\"']?(?:stylesheet|preconnect|preload)[^>]*href=[\"']?https?://"
)

# What typer writes about every command, cuts short, or sets in braces.
_TIDIER = (
    (re.compile(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n"), ""),
    (re.compile(r"\* `--help`: .*\n"), ""),
    (re.compile(r"\*\*Options\*\*:\n\n(?!\*)"), ""),
    (re.compile(r"` / (--no-)"), r"`\1"),
    (re.compile(r"\{([\w.]+)\}"), r"\1"),
    (re.compile(r"\[default: \((.*)\)\]"), r"[default: \1]"),
    (re.compile(r"  \[(default: .*|required)\]\n"), r" *(\1)*\n"),
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put a line for each decision under "Decisions"."""
    lines = ["decisions/index.md"]
    lines += [f"decisions/{file.name}" for file in decisions()]
    config.nav = _replaced(config.nav, "Decisions", lines)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    for path, make in (GENERATED | PICTURES).items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site whose pages load anything from elsewhere.

    Raises:
        PluginError: One does; it is named.
    """
    from mkdocs.exceptions import PluginError

    for page in sorted(Path(config.site_dir).rglob("*.html")):
        found = _LOADED.search(page.read_text(encoding="utf-8"))
        if found:
            raise PluginError(f"{page} loads from elsewhere: {found[0]}")


def decisions() -> list[Path]:
    """Return the decisions' pages in their order."""
    return sorted(DECISIONS.glob("[0-9]*.md"))


def command_line() -> str:
    """Return what ``budgetfit --help`` says, for every command, as a page."""
    from typer import Context
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from budgetfit.cli.app import app

    command = get_command(app)
    text = get_docs_for_click(
        obj=command, ctx=Context(command), name="budgetfit", title="Command line"
    )
    for pattern, new in _TIDIER:
        text = pattern.sub(new, text)
    return text.rstrip() + "\n"


def list_of_decisions() -> str:
    """Return a page with the title of each decision."""
    lines = ["# Decisions", "", "What was decided, and why; the newest last.", ""]
    for file in decisions():
        title = file.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
        lines.append(f"* [{title}]({file.name})")
    return "\n".join(lines) + "\n"


@functools.cache
def sample_plan() -> Any:  # noqa: ANN401 - a Plan, which needs torch
    """Return the plan that README.md shows."""
    from budgetfit import plan

    return plan(
        str(ROOT / "examples" / "configs" / "SmolLM2-1.7B"),
        gpu="rtx-4090",
        precision="bf16",
        max_length=4096,
        effective_batch_size=32,
    )


def sample_report() -> str:
    """Return the report of that plan."""
    from budgetfit.reporting.html.report import plan_page

    return plan_page(sample_plan())


def step_memory() -> str:
    """Return its memory over one training step as an SVG file."""
    from budgetfit.reporting.html.report import figure_file

    return figure_file(sample_plan(), "step_memory")


def changelog() -> str:
    """Return CHANGELOG.md, its links from ``docs/`` instead of from the root."""
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")


def _replaced(nav: Any, title: str, lines: list[str]) -> Any:  # noqa: ANN401 - YAML
    """Return a navigation in which ``title`` leads to ``lines``."""
    if isinstance(nav, list):
        return [_replaced(item, title, lines) for item in nav]
    if isinstance(nav, dict):
        return {
            key: lines if key == title else _replaced(item, title, lines)
            for key, item in nav.items()
        }
    return nav


GENERATED = {
    "reference/cli.md": command_line,
    "decisions/index.md": list_of_decisions,
    "changelog.md": changelog,
}
# No pages of the menu.
PICTURES = {"sample-report.html": sample_report, "step-memory.svg": step_memory}
