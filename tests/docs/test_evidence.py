"""Evidence pages begin with the answer and a picture; every case is behind a fold."""

import re
from collections import Counter
from pathlib import Path

import pytest

from docs import answers
from docs.evidence import (
    MOST_LINES,
    Errors,
    draw_errors,
    folded,
    rows_after,
    with_answers,
)
from tests.docs.markdown import DOCS, read

LONG = "| case | error |\n|---|---:|\n| bad | +9 % |"
LONG += "".join(f"\n| {number} | +0 % |" for number in range(MOST_LINES))
PAGE = f"""# Title

Text of two
lines.

## Short

| a | b |
|---|---|
| 1 | 2 |

### Every case

Before.

{LONG}

After.

## Long

{LONG}

```text
{"x" * 9}

{"y " * 9}
```
"""


def lines_of(page: str) -> Counter[str]:
    """Return the lines of a page that are not its folds."""
    return Counter(
        line
        for line in page.splitlines()
        if line and not line.startswith(("<details", "</details", "<summary", "### "))
    )


def outside_folds(page: str) -> str:
    return re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)


# -- folds ----------------------------------------------------------------------------


def test_a_fold_has_blank_lines_around_its_markdown() -> None:
    assert folded("3 < 4", "| a |\n|---|\n| 1 |\n") == (
        '<details markdown="1">\n<summary>3 &lt; 4</summary>\n\n'
        "| a |\n|---|\n| 1 |\n\n</details>"
    )


def test_cases_and_long_tables_are_folded_and_nothing_is_dropped() -> None:
    done = with_answers(PAGE, {})
    assert lines_of(done) == lines_of(PAGE)
    assert re.findall(r"<summary>(.*)</summary>", done) == [
        f"Every case: {MOST_LINES + 1} rows",
        f"All {MOST_LINES + 1} rows",
    ]
    left = outside_folds(done)
    assert "| 1 | 2 |" in left
    assert "After." in left
    assert "Before." not in left
    assert "| bad |" not in left
    assert "```text" in left


def test_a_long_text_is_folded_whole() -> None:
    text = "```text\n" + "\n\n".join("ab" * MOST_LINES) + "\n```"
    done = with_answers(f"# A\n\n{text}\n", {})
    assert text in done
    assert outside_folds(done).strip() == "# A"


def test_answers_stand_under_their_headings_and_are_replaced() -> None:
    once = with_answers(PAGE, {"# Title": "**1 case**", "## Long": "old"})
    assert once.startswith('# Title\n\n<div class="answer" markdown="1">\n\n**1 case**')
    again = with_answers(once, {"# Title": "**2 cases**"})
    assert "old" not in again
    assert again == with_answers(PAGE, {"# Title": "**2 cases**"})


def test_an_answer_without_its_heading_is_refused() -> None:
    with pytest.raises(ValueError, match="no '# Other' on the page"):
        with_answers(PAGE, {"# Other": "text"})


def test_cells_of_a_table_are_read_back() -> None:
    table = "Rows\n\n| a | b |\n|---|---|\n| x \\| y | 2 |\n\n| other |\n"
    assert rows_after(table, "Rows") == [["a", "b"], ["x \\| y", "2"]]
    with pytest.raises(ValueError, match="no table after 'Lines'"):
        rows_after(table, "Lines")


# -- pictures -------------------------------------------------------------------------


def test_each_case_is_a_mark_and_a_bad_one_a_cross() -> None:
    groups = [
        Errors("reserved", [0.0, 1.0, -5.0], [False, False, True]),
        Errors("allocated", [0.5], [False]),
    ]
    picture = draw_errors("Errors of four", groups, bad="too low")
    assert picture.count("<use") == 4
    crosses = [mark for mark in re.findall(r"<use[^>]*", picture) if "--limit" in mark]
    assert len(crosses) == 1
    assert "reserved (3)" in picture
    assert "red cross: too low" in picture
    assert 'aria-label="Errors of four"' in picture
    assert "prefers-color-scheme: dark" in picture


def test_small_errors_are_written_with_more_digits() -> None:
    assert Errors("a", [0.0, 0.004], [False] * 2).spread == (
        "median +0.002 %, from +0.000 % to +0.004 %"
    )
    assert Errors("a", [-2.0, 1.0, 8.0], [False] * 3).spread == (
        "median +1.00 %, from -2.00 % to +8.00 %"
    )


# -- pages ----------------------------------------------------------------------------

_ACCURACY = """# Accuracy

## Recorded on: null driver

### Every case, the worst first

| case | allocated | predicted | error | reserved | predicted | error | emptied |
|---|---:|---:|---:|---:|---:|---:|---:|
| a | 1,000 | 1,010 | +1.000 % | 2,000 | 2,000 | +0.000 % |  |
| b | 1,000 | 1,000 | +0.000 % | 2,000 | 1,900 | -5.000 % |  |
| c | 1,000 | 1,000 | +0.000 % | 2,000 | 2,000 | +0.000 % |  |

## On a real card

### Every run, the worst first

| model | a | b | c | d | MiB | MiB | error | MiB | MiB | error | phases |
|---|---|---|---|---|---:|---:|---:|---:|---:|---:|---|
| m | e | 1 | n | 2 | 10 | 10 | +0.20 % | 20 | 18 | -10.00 % | x |
"""


def test_accuracy_counts_what_is_exact_and_what_is_too_low() -> None:
    done = answers.accuracy(_ACCURACY, "accuracy")
    left = " ".join(outside_folds(done.page).split())
    assert "**3 training runs recorded" in left
    assert "to the byte in 2** (median +0.00 %, from -5.00 % to +0.00 %)" in left
    assert "allocated: median +0.00 %, from +0.00 % to +1.00 %." in left
    assert left.count("reserved median -10.00 %") == 2  # also under its own heading
    assert "1 of them too low by over 3 %" in left
    assert done.picture.count("<use") == 8
    assert "](accuracy.svg)" in left


@pytest.mark.parametrize("name", answers.PAGES)
def test_a_page_says_what_its_own_tables_say(name: str) -> None:
    page = read(f"docs/{name}.md")
    assert answers.PAGES[name](page, name).page == page, (
        f"Write it again: python -m docs.answers {name}"
    )
    assert (DOCS / f"{name}.svg").is_file()
    before = page[: page.index(f"]({name}.svg)")]
    assert "**" in before
    assert "|" not in before
    assert len(outside_folds(page).splitlines()) < 220


def test_a_page_is_written_with_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "DOCS", tmp_path)
    file = tmp_path / "accuracy.md"
    file.write_text(_ACCURACY)
    assert answers.main(["accuracy"]) == 0
    assert file.read_text().startswith('# Accuracy\n\n<div class="answer"')
    assert file.with_suffix(".svg").read_text().startswith("<svg")


def test_an_unknown_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert answers.main(["everything"]) == 2
    assert "'everything' is no evidence page" in capsys.readouterr().out
