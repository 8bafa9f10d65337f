"""What is not run says why, and is little; what is shown is compared."""

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks, links, pages
from tests.docs.print_again import first_paragraphs, printed_again
from tests.docs.run_page import PageError, run_page
from tests.docs.shown import is_shown
from tests.docs.test_pages_run import ELSEWHERE, MADE
from tests.integrations.page import SECTIONS

NOT_RUN = [
    block
    for page in pages()
    for block in blocks(page)
    if block.not_run and not page.startswith(MADE)
]


def test_few_blocks_are_not_run_and_each_has_a_reason() -> None:
    assert len(NOT_RUN) <= 12, [block.where for block in NOT_RUN]
    assert all(len(block.not_run.split()) >= 3 for block in NOT_RUN)


def test_a_block_that_is_not_run_only_shows_what_a_card_or_a_library_prints() -> None:
    """Or it needs several processes; such programs are run by the tests it names."""
    alone = [block for block in NOT_RUN if "several processes" not in block.not_run]
    assert {block.language for block in alone} <= {"text", "sh"}


def test_what_is_run_elsewhere_is_there_and_whole() -> None:
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())
    assert len(SECTIONS) == len(blocks("docs/integrations.md"))


def a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """Write a page; return its name, as the runner knows pages."""
    (tmp_path / "page.md").write_text(text)
    monkeypatch.setattr("tests.docs.markdown.ROOT", tmp_path)
    return "page.md"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\n1 / 0\n```", "page.md:2: ZeroDivisionError"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```", "page.md:6 shows:\n2"),
        ("```text\n2\n```", "page.md:2: a text block shows"),
        ("```\nls\n```", "page.md:2: say what the block is"),
        ("```sh\nbudgetfit gpus --cards\n```", "'budgetfit gpus --cards' ends with 2"),
        ("```sh\nmake tea\n```", "there is no `make tea`"),
        ("```sh\npython tea.py\n```", "there is no program tea.py"),
        ("```sh\nls\n```", "cannot run 'ls'"),
        ("```json\n{'a': 1}\n```", "page.md:2: Expecting property name"),
        ("```toml\na = \n```", "page.md:2: Invalid value"),
        ("```console\nls\n```", "a console block begins with '$ '"),
        (
            "```console\n$ budgetfit --version\nbudgetfit 99\n```",
            "page.md:2 shows:\nbudgetfit 99",
        ),
    ],
)
def test_a_page_that_says_what_is_not_so_is_found(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = a_page(tmp_path, monkeypatch, text)
    with pytest.raises(PageError) as raised:
        run_page(page, {})
    assert message in str(raised.value)


def test_a_page_that_is_right_passes_and_its_blocks_share_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "```python\na = 1\n```\n```python\nprint(a + 1)\n```\n```text\n2\n```\n"
    text += "<!-- not run: needs a card -->\n```text\nPASSED\n```\n"
    page = a_page(tmp_path, monkeypatch, text)
    run_page(page, {})


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("b\nc", "a\nb  \nc\nd\n", True),
        ("b\nd", "a\nb\nc\nd", False),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("d\n...\na", "a\nb\nc\nd", False),
        ("peak 1.01 GiB", "peak 1.02 GiB", False),
        ("Planned in 8.1 s.", "Planned in 12.9 s.", True),
    ],
)
def test_shown_lines_are_compared_to_the_digit(
    shown: str, printed: str, *, expected: bool
) -> None:
    assert is_shown(shown, printed) is expected


def test_the_readme_has_no_links_that_the_package_index_cannot_follow() -> None:
    assert [link for link in links("README.md") if "://" not in link] == []


def test_a_page_is_printed_again_with_as_many_paragraphs_as_it_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "```console\n$ budgetfit gpus \\\n    --json\nold\n"
    page = a_page(tmp_path, monkeypatch, f"{text}$ budgetfit --version\n```")
    (block,) = blocks(page)
    lines = printed_again(block).splitlines()
    assert lines[:2] == ["$ budgetfit gpus \\", "    --json"]
    assert any("rtx-4090" in line for line in lines)
    assert "old" not in lines
    assert lines[-1] == "$ budgetfit --version"
    assert first_paragraphs("a \n\nb\nc\n\nd\n", like="x\n\ny") == ["a", "", "b", "c"]
