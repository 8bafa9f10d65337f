"""Evidence pages begin with the answer and a picture; every case is behind a fold."""

import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run as bench
from docs import answers
from docs.evidence import (
    MOST_LINES,
    Errors,
    draw_errors,
    folded,
    rows_after,
    with_answers,
)
from tests.accuracy import report
from tests.accuracy.cases import CASES
from tests.accuracy.predict import Comparison
from tests.docs.markdown import DOCS, read
from tests.zoo import run
from tests.zoo.check import STAGES, Outcome

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
        f"All {MOST_LINES + 1} rows: case, error, …",
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


def test_make_accuracy_writes_a_page_with_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(iter(CASES.values()))
    row = Comparison(
        case=case,
        predicted_allocated=1010,
        recorded_allocated=1000,
        predicted_reserved=2000,
        recorded_reserved=2000,
        formula_allocated=1010,
        predicted_retries=0,
        recorded_retries=0,
    )
    (tmp_path / "here" / "torch-2.11").mkdir(parents=True)
    (tmp_path / "here" / "torch-2.11" / "a.json").touch()
    result = report.Result("a", "null driver", "torch 2.11", case, row)
    monkeypatch.setattr(report, "RECORDINGS", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "release", lambda _: "torch-2.11")
    monkeypatch.setattr(report, "ProcessPoolExecutor", _InThisProcess)
    monkeypatch.setattr(report, "result_of", lambda _: result)
    monkeypatch.setattr("sys.argv", ["report"])
    assert report.main() == 1  # it is beyond the bounds
    page = (tmp_path / "accuracy-torch-2.11.md").read_text()
    left = " ".join(outside_folds(page).split())
    assert left.startswith('# Accuracy with torch-2.11 <div class="answer"')
    assert "predicted to the byte in 1**; allocated: median +1.00 %" in left
    assert "Every case, the worst first: 1 rows</summary>" in page
    assert "No recording of a real GPU" in left
    assert (tmp_path / "accuracy-torch-2.11.svg").is_file()


class _InThisProcess(contextlib.nullcontext[None]):
    """An executor that does it here."""

    def __init__(self, _: int) -> None:
        super().__init__()

    def __enter__(self) -> Any:
        return self

    map = staticmethod(map)


_TIMES = """# Step times

Text.

| | rows | signed median | median | p90 | worst | x | in the printed range |
|---|---|---|---|---|---|---|---|
| one GPU | 3 | -1.5% | 2.0% | 9.0% | -60% | 50% | 67% |
| eight GPUs | 1 | -16.6% | 16.6% | 16.6% | -17% | 0% | 0% |

## Every row of one GPU

| error | GPU | in range | by |
|---|---|---|---|
| -60% | t4 | no | timm |
| +2% | t4 | yes | mli |
| +1% | t4 | yes | timm |

## Eight GPUs

| error | GPU | in range | by |
|---|---|---|---|
| -17% | a100 | no | foundry |
"""


def test_times_are_counted_by_source() -> None:
    done = answers.times(_TIMES, "times")
    left = " ".join(outside_folds(done.page).split())
    assert (
        "**3 published steps on one GPU: half of them are predicted within 2.0%" in left
    )
    assert "(signed median -1.5%, worst -60%); 67% lie in the range" in left
    assert "1 steps on eight GPUs" in left
    assert "signed median -16.6%, worst -17%." in left
    names = re.findall(r">([^<]* \(\d+\))<", done.picture)
    assert names == ["timm (2)", "mli (1)", "foundry, eight GPUs (1)"]
    assert len(re.findall(r"<use[^>]*--limit", done.picture)) == 2


_PUBLISHED = """# What others measured

| | rows | median of sizes | median | lowest | highest | as allowed |
|---|---|---|---|---|---|---|
| **reserved** | 3 | 7.00% | +7.00% | +4.00% | +10.00% | 2 |
| hub, reserved | 3 | 7.00% | +7.00% | +4.00% | +10.00% | 1 |

## Rows that miss what they are allowed (2)

* **a/lora** (hub), +10.00%: why.
* **c** (hub), fits: why.

## Every predicted row

| row | card | settings | footprint | published | predicted | error | allowed |
|---|---|---|---|---|---|---|---|
| a/lora ([hub](https://example.org)) | t4 | x | reserved | 1 | 2 | +10.00% | 5% |
| a ([hub](https://example.org) table) | t4 | x | reserved | 1 | 2 | +4.00% | 5% |
| b ([hub](https://example.org)) | t4 | x | reserved | 1 | 2 | +7.00% | 5% |
| c ([hub](https://example.org)) | t4 | x | reserved | out | 2 | fits | 5% |

## Process: outside

| card | MiB | |
|---|---|---|
| t4 | 1 | outside |
| t4 | 1 |  |
"""


def test_published_rows_are_crossed_where_they_miss_what_they_are_allowed() -> None:
    done = answers.published(_PUBLISHED, "published")
    left = " ".join(outside_folds(done.page).split())
    assert "**Of 3 published numbers and 1 runs out of memory, 2 are predicted" in left
    assert "reserved (3): median +7.00%, from +4.00% to +10.00%." in left
    assert "Of 2 reports of what a process holds outside the allocator, 1 lie" in left
    assert "hub, reserved (3)" in done.picture
    assert len(re.findall(r"<use[^>]*--limit", done.picture)) == 1


def outcome(name: str, task: str, *, fails: str = "") -> Outcome:
    if fails:
        return Outcome(name, task, ["traced"], reasons={"planned": fails})
    return Outcome(name, task, list(STAGES))


def test_the_zoo_is_written_by_task_and_failures_are_not_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [outcome(f"Model{number}", "image") for number in range(11)]
    found += [outcome("Speech", "sound"), outcome("Broken", "image", fails="a | b")]
    monkeypatch.setattr(run, "zoo", dict)
    monkeypatch.setattr(run, "_outcomes", lambda *_: found)
    monkeypatch.setattr(run, "PAGE", tmp_path / "zoo.md")
    monkeypatch.setattr("sys.argv", ["run", "--write"])
    assert run.main() == 1
    page = (tmp_path / "zoo.md").read_text()
    left = outside_folds(page)
    assert "**12 of 13 models pass every stage: traced, planned, applied" in left
    assert "Not Broken: planned: a \\| b." in left
    assert "| Broken | image | yes | no | no | no |" in left
    assert re.findall("<summary>(.*)</summary>", page) == ["image: 11", "sound: 1"]
    for each in found:
        assert len(re.findall(rf"^\| {each.name} \|", page, re.MULTILINE)) == 1
    picture = (tmp_path / "zoo.svg").read_text()
    texts = ("1 of 13", "11 of 12", "1 of 1", "1 other tasks")
    assert all(f">{text}</text>" in picture for text in texts)
    assert answers.zoo(page, "zoo").page == page


def test_a_zoo_without_failures_says_so() -> None:
    page = run.page([outcome("A", "image"), outcome("B", "sound")], STAGES)
    done = answers.zoo(page, "zoo").page
    assert "**2 of 2 models pass every stage" in done
    assert "do not pass" not in done
    assert answers.zoo(done, "zoo").page == done


_OUTPUTS = {
    "plan_times": """| plan | for | answer, s (median of 3) | reached |
|---|---|---|---|
| a | t4 | 2.0 | yes |
| b | t4 | 9.0 | no |
| c | t4 | 4.0 | yes |""",
    "against_full": """| model | card | precision | faster by |
|---|---|---|---|
| a | t4 | bf16 | +20.0% |
| b | t4 | bf16 | -1.0% |""",
    "solver_speed": "\n".join(f"line {number}" for number in range(20)),
}


def test_make_bench_writes_how_long_and_how_much_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [each for each in bench.BENCHMARKS if each.name in _OUTPUTS]
    monkeypatch.setattr(bench, "BENCHMARKS", chosen)
    monkeypatch.setattr(bench, "output_of", lambda each, _: _OUTPUTS[each.name])
    monkeypatch.setattr(bench, "introduction", lambda _: "What is compared.")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "PAGE", tmp_path / "performance.md")
    assert bench.main([]) == 0
    page = (tmp_path / "performance.md").read_text()
    said = " ".join(page.split("![")[0].split())
    assert "3 models are there after 2.0 to 9.0 s (median 4.0 s; 2 of 3 within" in said
    assert "-1.0 % to +20.0 % (median +9.5 %) faster" in said
    assert "slower in 1 of 2 cases" in said
    assert "line 7" not in outside_folds(page)
    picture = (tmp_path / "performance.svg").read_text()
    assert picture.index("b, t4, bf16") < picture.index("a, t4, bf16")


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
    assert len(outside_folds(page).splitlines()) < 250


def test_a_page_is_written_with_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "DOCS", tmp_path)
    file = tmp_path / "accuracy.md"
    file.write_text(_ACCURACY)
    assert answers.main(["accuracy"]) == 0
    assert file.read_text().startswith('# Accuracy\n\n<div class="answer"')
    assert file.with_suffix(".svg").read_text().startswith("<svg")


def test_a_page_without_its_table_is_written_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "performance.md"
    with pytest.raises(ValueError, match="no table after '## How long planning"):
        answers.write(file, "# Performance\n\nA run of hours.\n")
    assert file.read_text() == "# Performance\n\nA run of hours.\n"


def test_an_unknown_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert answers.main(["everything"]) == 2
    assert "'everything' is no evidence page" in capsys.readouterr().out
