"""The report in a real browser, where playwright and Chromium are installed.

With axe-playwright-python, accessibility is checked by axe-core as well.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.reporting.sample_plans import sample_cards, sample_plan
from tests.reporting.test_html_report import with_curves

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytest.importorskip("matplotlib")
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
SIZES = {"desktop": (1200, 900), "phone": (360, 740)}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    with_curves(sample_plan()).report(path, comparison=sample_cards())
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield opened
        opened.close()


@pytest.fixture(params=[(size, mode) for size in SIZES for mode in ("light", "dark")])
def page(
    request: pytest.FixtureRequest, browser: Browser, page_file: Path
) -> Iterator[Page]:
    """The open page; it must say nothing in the console and load nothing."""
    size, mode = request.param
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=mode
    )
    opened = context.new_page()
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda sent: said.append(sent.url))
    opened.goto(page_file.as_uri())
    yield opened
    outside = [url for url in said if not url.startswith(("file:", "data:"))]
    context.close()
    assert not outside


def test_nothing_is_wider_than_the_page_and_one_width_is_shown(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    narrow = page.viewport_size["width"] < 600
    assert page.locator("svg.narrow").first.is_visible() == narrow
    assert page.locator("svg.wide").first.is_visible() != narrow


def test_marks_say_their_numbers_to_mouse_and_keyboard(page: Page) -> None:
    mark = page.locator("svg .mark[tabindex]:visible").first
    mark.hover()
    says = page.locator(".budgetfit-says")
    assert says.inner_text() == mark.get_attribute("aria-label")
    page.keyboard.press("Escape")
    assert not says.is_visible()
    page.keyboard.press("Tab")
    for _ in range(40):
        if says.is_visible():
            break
        page.keyboard.press("Tab")
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert says.inner_text() == focused


def test_tables_of_a_page_are_printed(page: Page) -> None:
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


def test_axe_finds_nothing(page: Page) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    found = axe.run(page)
    assert found.violations_count == 0, found.generate_report()
