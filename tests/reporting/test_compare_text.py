import json
from dataclasses import replace

from budgetfit.reporting.json import compare_json, why_json
from budgetfit.reporting.render import compare_text, render
from tests.reporting.sample_plans import sample_cards, sample_model, sample_row

ROWS = sample_cards()


def text_of(*numbers: int) -> str:
    return render(compare_text([ROWS[each] for each in numbers], sample_model()))


def test_the_smallest_that_fits_and_the_fastest_are_the_answer() -> None:
    text = text_of(0, 1, 2, 3)
    assert "l4 is the smallest that fits." in text
    # 66 samples in 6.6 s against 8.25 s
    assert "rtx-4090 is the fastest: 1.25 times as fast." in text
    assert "l4: the smallest that fits, and the fastest." in text_of(0, 1)


def test_each_card_is_a_row_with_its_settings_and_speed() -> None:
    rows = {row.split()[0]: row for row in text_of(0, 1, 2, 3).splitlines() if row}
    expected = "6 x 11 bf16-mixed 22.00 of 23.00 16 of 24 10 1.25x"
    assert " ".join(rows["rtx-4090"].split()[2:]) == expected
    assert rows["l4"].split()[-2:] == ["8", "1x"]
    assert rows["t4"].split()[1] == rows["v100-16gb"].split()[1] == "no"
    assert "needs compute capability 8.0" in text_of(0, 3)


def test_without_a_card_that_fits_it_says_what_is_needed() -> None:
    assert "at least 22.00 GiB are needed" in text_of(0, 3)
    assert "None of these cards can run" in text_of(3)


def test_a_comparison_is_plain_text_within_80_columns() -> None:
    text = text_of(0, 1, 2, 3)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80


def test_the_documents_hold_every_field() -> None:
    cards = json.loads(compare_json(ROWS))["cards"]
    assert [card["fits"] for card in cards] == [False, True, True, False]
    assert cards[2]["gpu"]["name"] == "rtx-4090"
    assert cards[2]["estimate"]["recipe"]["batch_size"] == 6
    assert cards[2]["samples_per_s"] == 10
    assert cards[3]["samples_per_s"] is None
    row = json.loads(why_json(sample_row()))
    assert row["headroom_bytes"] == row["limit_bytes"] - row["peak_bytes"]
    assert [choice["mode"] for choice in row["choices"]] == ["keep", "recompute"]


def test_methods_are_answered_one_by_one_and_stand_in_a_column() -> None:
    rows = [
        replace(row, method=method)
        for row in (ROWS[1], ROWS[2])
        for method in ("full", "lora")
    ]
    text = render(compare_text(rows, sample_model()), width=100)
    assert "WHICH CARD AND METHOD" in text
    assert "full: l4 is the smallest that fits. rtx-4090 is the fastest: 1.25" in text
    assert [line.split()[:2] for line in text.splitlines() if "yes" in line] == [
        [card, method] for card in ("l4", "rtx-4090") for method in ("full", "lora")
    ]


def test_one_card_is_not_called_the_smallest() -> None:
    rows = [replace(ROWS[2], method="lora"), replace(ROWS[0], method="full")]
    text = render(compare_text(rows, sample_model()), width=100)
    assert "lora: It fits: 10 samples/s." in text
    assert "full: It does not fit: at least 22.00 GiB are needed." in text
    assert "It fits: 10 samples/s." in text_of(2)


def test_a_pass_over_samples_is_timed_where_it_fits() -> None:
    text = render(compare_text(ROWS, sample_model(), 36_000), width=100)
    assert "time: of one pass over 36,000 samples." in " ".join(text.split())
    rows = {row.split()[0]: row for row in text.splitlines() if row}
    assert rows["rtx-4090"].endswith("1.0 h")
    assert rows["t4"].endswith("-")
