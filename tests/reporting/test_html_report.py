"""The report with figures: one file that loads nothing, with the plan's numbers."""

import dataclasses
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from budgetfit.core.block_report import BlockRow
from budgetfit.core.budget import Budget
from budgetfit.core.memory_timeline import TimelinePoint
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Alternative, Plan
from budgetfit.core.plan_curves import LazyCurves
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.errors import InputError
from budgetfit.gpus.nccl_memory import NcclMemory
from budgetfit.reporting.header import plan_header
from budgetfit.reporting.html.colors import COLORS
from budgetfit.reporting.html.figures.step_memory import ORDER
from budgetfit.reporting.html.report import comparison_page, figure_file, plan_page
from budgetfit.reporting.html.section import Number
from budgetfit.reporting.html.summary import answers
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text
from tests.reporting.parsed_page import Element, parsed
from tests.reporting.sample_plans import (
    BLOCKS,
    GIB,
    sample_cards,
    sample_curves,
    sample_estimate,
    sample_model,
    sample_plan,
    sample_row,
)

pytest.importorskip("matplotlib")

TITLES = [
    "Memory over one training step",
    "The process on the GPU",
    "What is allocated at the peak",
    "What happens to each block",
    "How fast it is, and what others take",
    "Memory against speed",
    "Batch size against speed",
    "Speed on each GPU",
]
MOST_BYTES = 1_500_000


def with_curves(plan: Plan) -> Plan:
    curves = sample_curves(plan)
    return plan.changed(lazy_curves=LazyCurves(lambda: curves))


def test_the_memory_of_the_step_has_a_place_for_each_category() -> None:
    assert sorted(ORDER) == sorted(CATEGORIES)


def test_the_report_says_how_many_gpus() -> None:
    several = Parallelism(engine="ddp", gpus=2)
    recipe = dataclasses.replace(sample_plan().recipe, parallelism=several)
    found = answers(sample_plan(recipe=recipe, estimate=sample_estimate(recipe)))[0]
    assert ("GPUs", "2, ddp") in found.facts
    assert found.answer == Number("batch size 6 on each GPU", 6)
    assert all(name != "GPUs" for name, _ in answers(sample_plan())[0].facts)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Has everything that a report can show."""
    rows = tuple(
        dataclasses.replace(sample_row(), name=name, segment=(name,)) for name in BLOCKS
    )
    return with_curves(sample_plan(block_table=rows))


@pytest.fixture(scope="module")
def page(plan: Plan) -> str:
    return plan_page(plan, comparison=sample_cards())


@pytest.fixture(scope="module")
def root(page: str) -> Element:
    return parsed(page)


def figure(root: Element, title: str) -> Element:
    """The section of a figure."""
    (found,) = [
        each
        for each in root.all("section")
        if each.attributes.get("class") == "figure" and each.one("h2").text == title
    ]
    return found


def rows(root: Element, title: str) -> list[list[float | str]]:
    """The table of a figure: exact numbers, and texts."""
    found = []
    for row in figure(root, title).one("tbody").all("tr"):
        cells: list[float | str] = []
        for cell in (*row.all("th"), *row.all("td")):
            number = next(cell.all("data"), None)
            value = cell.text if number is None else number.attributes["value"]
            cells.append(value if number is None else float(value))
        found.append(cells)
    return found


def said(root: Element, title: str) -> list[str]:
    """What the marks of the wide figure say."""
    svg = next(figure(root, title).all("svg", **{"class": "wide"}))
    return [mark.one("title").text for mark in svg.all("g", **{"class": "mark"})]


def test_every_figure_is_there_with_a_table(root: Element) -> None:
    figures = list(root.all("section", **{"class": "figure"}))
    assert [each.one("h2").text for each in figures] == TITLES
    for each in figures:
        widths = [svg.attributes["class"] for svg in each.all("svg")]
        assert widths == ["wide", "narrow"]
        columns = len(each.one("thead").one("tr").inside)
        assert all(len(row) == columns for row in rows(root, each.one("h2").text))


def test_it_loads_nothing(page: str, root: Element) -> None:
    assert "://" not in page
    assert not re.search(r"@import|\bsrc=", page)
    assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)\)", page))
    hrefs = [e.attributes["href"] for e in root.all() if "href" in e.attributes]
    assert all(href.startswith(("#", "data:")) for href in hrefs)
    assert not list(root.all("img")) + list(root.all("iframe"))


def test_no_id_stands_twice_and_what_is_named_is_there(
    page: str, root: Element
) -> None:
    ids = [each.attributes["id"] for each in root.all() if "id" in each.attributes]
    assert len(ids) == len(set(ids))
    named = {*re.findall(r"url\(#([^)]*)\)", page), *re.findall(r'href="#(\w+)"', page)}
    assert named <= set(ids)


def test_every_figure_is_well_formed(page: str) -> None:
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(figures) == 2 * len(TITLES)
    for svg in figures:
        assert ET.fromstring(svg).get("aria-label")


def test_the_first_screen_answers_three_questions(root: Element, plan: Plan) -> None:
    answers = list(root.one("div", **{"class": "answers"}).all("section"))
    numbers = [
        [float(number.attributes["value"]) for number in each.all("data")]
        for each in answers
    ]
    estimate = plan.estimate
    # 23 GiB usable, 22 GiB reserved
    assert [each[0] for each in numbers] == [6, 1 * GIB, estimate.samples_per_s]
    assert numbers[1][1:] == [
        estimate.reserved_bytes,
        plan.budget.usable_bytes,
        estimate.allocated_bytes,
        estimate.process_bytes,
    ]
    assert "Yes, with 1.00 GiB to spare" in answers[1].text
    assert (
        "recompute blocks 0-15 (16 of 24); keep all activations of blocks 16-23"
        in answers[0].text
    )
    assert "25 % faster than checkpointing every block" in answers[2].text


def test_the_timeline_has_the_numbers_of_the_plan(root: Element, plan: Plan) -> None:
    points = plan.estimate.timeline.points
    found = rows(root, TITLES[0])
    assert [row[-2:] for row in found] == [
        [point.allocated_bytes, point.reserved_bytes] for point in points
    ]
    for row, held in zip(found, sample_curves(plan).category_bytes, strict=True):
        assert row[1:-2] == [held["parameters"], held["activations"]]
        assert sum(held.values()) == row[-2]
    for text, point in zip(said(root, TITLES[0]), points, strict=True):
        assert f"{format_bytes(point.allocated_bytes)} allocated" in text
        assert f"{format_bytes(point.reserved_bytes)} reserved" in text


def test_the_process_and_its_peak_have_the_numbers_of_the_plan(
    root: Element, plan: Plan
) -> None:
    estimate, budget = plan.estimate, plan.budget
    assert {value for _, value in rows(root, TITLES[1])} == {
        estimate.allocated_bytes,
        estimate.reserved_bytes,
        estimate.process_bytes,
        budget.usable_bytes,
        budget.context_bytes,
        budget.headroom_bytes,
        budget.total_bytes,
        plan.gpu.total_bytes,
    }
    peak = {name: size for name, size, _ in rows(root, TITLES[2])}
    for category, size in estimate.at_peak_bytes.items():
        assert peak.pop(category.replace("_", " "), 0) == size
    assert peak.pop("all of it") == estimate.allocated_bytes
    assert peak == {
        f"layer {name}": size for name, size in estimate.timeline.at_peak_layers
    }


def test_nccl_is_no_part_of_the_cuda_context() -> None:
    """24 GiB = 21 usable + 0.5 context + 2 NCCL + 0.5 headroom; 20 reserved of 21."""
    nccl = NcclMemory(1, GIB, 2 * GIB)
    aside = GIB // 2
    estimate = sample_estimate(
        reserved_bytes=20 * GIB,
        process_bytes=20 * GIB + aside + nccl.high_bytes,
        nccl_bytes=(nccl.low_bytes, nccl.high_bytes),
    )
    budget = Budget(24 * GIB, aside, aside, nccl=nccl)
    plan = sample_plan(estimate=estimate, budget=budget)
    page = parsed(plan_page(plan))
    shown = said(page, TITLES[1])
    assert "CUDA context and kernels: 512 MiB" in shown
    assert "NCCL, at most: 2.00 GiB" in shown
    text = figure(page, TITLES[1]).text
    assert "1.00 GiB below the limit (the line), which leaves 512 MiB free" in text
    assert ["set aside for NCCL", 2 * GIB] in rows(page, TITLES[1])
    assert "  NCCL takes at most 2.00 GiB" in plan_header(plan)


def test_each_block_has_its_treatment_and_cost(root: Element, plan: Plan) -> None:
    found = {name: cells for name, *cells in rows(root, TITLES[3])}
    assert list(found) == list(BLOCKS)
    choices = {row.name: row.choice for row in plan.block_table}
    for number, name in enumerate(BLOCKS):
        mode = "recomputed" if number < 16 else "kept"
        choice = choices[name]
        assert found[name] == [mode, choice.saved_bytes, choice.extra_ms]
        assert said(root, TITLES[3])[number].startswith(f"{name}: {mode}; 16 MiB wait")


def test_the_alternatives_have_their_numbers(root: Element, plan: Plan) -> None:
    estimates = [plan.estimate, *(row.estimate for row in plan.alternatives)]
    for row, estimate, text in zip(
        rows(root, TITLES[4]), estimates, said(root, TITLES[4]), strict=True
    ):
        assert row[3:7] == [
            estimate.allocated_bytes,
            estimate.reserved_bytes,
            estimate.step_ms,
            estimate.samples_per_s,
        ]
        assert row[7] == ("fits" if estimate.fits else "too much")
        assert f"{rate_text(estimate.samples_per_s)} samples/s" in text
        assert f"{format_bytes(estimate.reserved_bytes)} reserved" in text


def test_the_curves_have_their_numbers_and_recipes(root: Element, plan: Plan) -> None:
    curves = sample_curves(plan)
    shown = [curves.plan, *curves.practices, *curves.front]
    assert [row[1:3] for row in rows(root, TITLES[5])] == [
        [point.peak_bytes, point.samples_per_s] for point in shown
    ]
    assert any(
        "every block recomputed: 8 samples/s at 11.00 GiB; recompute all 24 blocks"
        in text
        for text in said(root, TITLES[5])
    )
    assert [[row[0], row[2], row[3]] for row in rows(root, TITLES[6])] == [
        [point.batch_size, point.peak_bytes, point.samples_per_s]
        for point in curves.batch_sizes
    ]


def test_the_gpus_have_their_numbers_or_the_reason(root: Element) -> None:
    for row, card in zip(rows(root, TITLES[7]), sample_cards(), strict=True):
        assert row[0] == card.gpu.name
        assert row[5] == card.budget.usable_bytes
        if card.estimate is None:
            assert row[7] == card.problem
        else:
            assert row[6] == card.estimate.samples_per_s


def test_the_keyboard_reaches_the_marks_and_hears_their_numbers(root: Element) -> None:
    for svg in root.all("svg"):
        marks = [mark for mark in svg.all("g") if "tabindex" in mark.attributes]
        assert svg.attributes["role"] == ("group" if marks else "img")
        for mark in marks:
            assert mark.attributes["role"] == "img"
            assert mark.attributes["aria-label"] == mark.one("title").text


def test_text_of_others_is_shown_as_it_is() -> None:
    name = "<script>alert('$x$')</script>"
    model = sample_model(name=name, blocks=(f"{name}.0", f"{name}.1"))
    recipe = dataclasses.replace(sample_plan().recipe, segments=())
    plan = sample_plan(
        model=model,
        estimate=sample_estimate(recipe),
        alternatives=(),
        warnings=(f"{name} is odd",),
    )
    root = parsed(plan_page(plan))
    assert root.one("h1").text == name
    assert len(list(root.all("script"))) == 1
    assert f"{name}.1" in root.text


def test_a_saved_plan_has_what_it_saved(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    Plan.load(path).report(tmp_path / "plan.html")
    root = parsed((tmp_path / "plan.html").read_text(encoding="utf-8"))
    titles = [each.one("h2").text for each in root.all("section")]
    assert [title for title in titles if title in TITLES] == TITLES[:5]
    points = plan.estimate.timeline.points
    assert [row[1:] for row in rows(root, TITLES[0])] == [
        [point.allocated_bytes, point.reserved_bytes] for point in points
    ]


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    estimate = sample_estimate(reserved_bytes=24 * GIB, fits=False)
    root = parsed(plan_page(sample_plan(estimate=estimate)))
    answer = root.one("section", **{"class": "answer bad"})
    assert "No: 1.00 GiB too much" in answer.text


def test_a_comparison_has_a_page_of_its_own() -> None:
    reason = "qlora: its linear layers cannot be stored in 4 bits"
    cards = [
        dataclasses.replace(row, problem=row.problem and reason)
        for row in sample_cards()
    ]
    root = parsed(comparison_page(cards, sample_model()))
    marks = said(root, TITLES[7])
    assert any("cannot run what was asked for" in each for each in marks)
    assert [each.text for each in root.all("h2")] == [TITLES[7], "Watch out"]
    assert reason in root.text


def test_a_notebook_shows_a_part_without_scripts(plan: Plan) -> None:
    html = plan._repr_html_()
    assert html is not None
    root = parsed(html)
    assert [each.tag for each in root.inside if isinstance(each, Element)] == [
        "style",
        "div",
    ]
    assert not list(root.all("script"))
    # Its style is for the report alone.
    rules = re.sub(
        r"@(media|container)[^{]*\{|\{[^{}]*\}|\}", ";", root.one("style").text
    )
    selectors = [each.strip() for each in rules.split(";") if each.strip()]
    assert selectors
    assert all("budgetfit" in each for each in selectors), selectors


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_its_libraries_one_line_says_what_to_install(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf"needs {missing}.*budgetfit\[report\]"):
        plan.report(tmp_path / "plan.html")
    assert not (tmp_path / "plan.html").exists()
    assert plan._repr_html_() is None


def test_a_plan_of_a_thousand_blocks_stays_small() -> None:
    names = tuple(f"model.layers.{number}" for number in range(1000))
    points = tuple(
        TimelinePoint(
            step=1,
            micro_step=0,
            phase=phase,
            block=name,
            allocated_bytes=(10 + number % 7) * GIB,
            reserved_bytes=22 * GIB,
        )
        for phase, order in (("forward", names), ("backward", names[::-1]))
        for number, name in enumerate(order)
    )
    estimate = sample_estimate()
    line = dataclasses.replace(estimate.timeline, points=points, peak=6)
    block: BlockRow = sample_row()
    plan = with_curves(
        sample_plan(
            estimate=dataclasses.replace(estimate, timeline=line),
            model=sample_model(blocks=names),
            block_table=tuple(dataclasses.replace(block, name=name) for name in names),
        )
    )
    page = plan_page(plan)
    assert len(page.encode()) < MOST_BYTES
    shown = rows(parsed(page), TITLES[0])
    known = {(p.allocated_bytes, p.reserved_bytes) for p in points}
    assert {(row[-2], row[-1]) for row in shown} <= known
    assert max(float(row[-2]) for row in shown) == 16 * GIB


def luminance(color: str) -> float:
    """Relative luminance by WCAG 2.2."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
    ]
    return sum(
        x * share for x, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True)
    )


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_marks_stand_out(dark: bool) -> None:
    """4.5:1 for text, 3:1 for marks: WCAG 2.2, 1.4.3 and 1.4.11."""
    values = {name: luminance(pair[dark]) for name, pair in COLORS.items()}
    for name, light in values.items():
        if name in {"paper", "panel", "line"}:
            continue
        text = name in {"ink", "soft-ink", "accent", "limit"}
        for ground in ("paper", "panel") if text else ("paper",):
            low, high = sorted((light, values[ground]))
            assert (high + 0.05) / (low + 0.05) >= (4.5 if text else 3), (name, ground)


def test_every_color_is_declared_for_both_modes_and_told_apart(page: str) -> None:
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    assert used <= set(COLORS)
    for name in used:
        light, dark = COLORS[name]
        assert f"--{name}:{light}" in page
        assert f"--{name}:{dark}" in page
    for mode in (0, 1):
        assert len({pair[mode] for pair in COLORS.values()}) == len(COLORS)
    svgs = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert not re.findall(
        r"#[0-9a-f]{6}\b(?!\))", re.sub(r'id="\w+"|#[mp]\w+', "", svgs)
    )


def test_a_figure_can_be_a_file_of_its_own(plan: Plan) -> None:
    text = figure_file(plan, "step_memory")
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert all(text.count(f"--{name}:") == 2 for name in used)


def test_ratios_are_to_the_plan() -> None:
    """Of 10 samples per second."""
    own = sample_estimate()
    slow, lora = (dataclasses.replace(own, step_ms=own.step_ms * n) for n in (2, 0.5))
    rows = [
        Alternative(label="everything kept", estimate=own, fits=True),
        Alternative(label="lowest memory", estimate=slow, fits=True),
        Alternative(label="LoRA", estimate=lora, fits=True, changes_training=True),
    ]
    plan = sample_plan(alternatives=tuple(rows))
    svg = next(figure(parsed(plan_page(plan)), TITLES[4]).all("svg"))
    beside = re.findall(r"[\d.]+/s(?: \([^)]*\))?", svg.text)
    assert sorted(beside) == ["10/s", "10/s (the same)", "20/s (+100 %)", "5/s (-50 %)"]
