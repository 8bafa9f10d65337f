"""Every block of README and docs/ runs, parses, or says why it does not."""

import os
from pathlib import Path

import pytest

from budgetfit.traces.cache.folder import CACHE_VARIABLE
from tests.docs import stand_ins
from tests.docs.markdown import blocks, pages
from tests.docs.page_setups import SETUPS
from tests.docs.run_page import run_page
from tests.integrations.adapters import QUIET

# Run elsewhere, each section by itself and looked at more closely.
ELSEWHERE = {
    "docs/integrations.md": "tests/integrations/test_docs_integrations.py",
    "docs/keras.md": "tests/docs/test_keras_page.py",
}
# Made by a program from what it found: `make bench`, `make accuracy`, `make zoo`,
# `python -m docs.what_fits`.
MADE = (
    "docs/performance.md",
    "docs/accuracy",
    "docs/published.md",
    "docs/zoo.md",
    "docs/what-fits.md",
)
PAGES = [
    page
    for page in pages()
    if page not in ELSEWHERE and not page.startswith(MADE) and blocks(page)
]


@pytest.fixture
def workshop(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A folder of a page's own; traces are kept between the plans of a session."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv(CACHE_VARIABLE, str(shared / "traces-of-pages"))
    stand_ins.put_in_place(monkeypatch, tmp_path)
    return tmp_path


@QUIET  # a page sets up peft as its own page says
@pytest.mark.usefixtures("workshop")
@pytest.mark.parametrize("page", PAGES)
def test_what_the_page_says_is_so(page: str) -> None:
    names = SETUPS[page]() if page in SETUPS else {}
    run_page(page, {"__name__": "page", **names})
