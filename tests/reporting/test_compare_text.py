import json
from dataclasses import replace

import pytest

from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import GpuComparison
from budgetfit.errors import InputError
from budgetfit.reporting.json import compare_json, estimate_json, why_json
from budgetfit.reporting.render import WIDE, compare_text, render
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


def test_groups_of_cards_say_how_many_and_by_which_engine() -> None:
    estimate = ROWS[2].estimate
    assert estimate is not None
    parallelism = Parallelism(engine="fsdp2", gpus=8, gpus_per_node=4)
    recipe = replace(estimate.recipe, segments=(), parallelism=parallelism)
    eight = replace(ROWS[2], estimate=replace(estimate, recipe=recipe))
    eight = replace(eight, gpus=8, nodes=2, price_per_hour=4.0)
    text = render(compare_text([ROWS[2], eight], sample_model()), width=WIDE)
    rows = [row.split() for row in text.splitlines() if row.startswith("rtx-4090x4x2")]
    assert rows[0][-1] == "fsdp2"
    # 8 ranks, and the step's time is that of one: eight times the samples.
    assert rows[1][1:] == ["4.00", "72,000"]
    assert "rtx-4090x4x2 is the fastest: 8 times as fast." in text
    assert "x8x4: on four" in text
    assert "engine" not in text_of(0, 1, 2)


def test_rates_times_and_costs_are_those_of_the_data() -> None:
    # The longest alone: 10 samples/s.
    estimate = ROWS[2].estimate
    assert estimate is not None
    over = replace(estimate, data_samples_per_s=40.0)
    row = replace(ROWS[2], estimate=over, price_per_hour=2.0)
    assert row.samples_per_money == 72_000
    assert row.cost(144_000) == 2.0
    assert over.hours(144_000) == 1.0
    (card,) = json.loads(compare_json([row], 144_000))["cards"]
    one = json.loads(estimate_json(over, 144_000))
    for found in (card, one):
        assert (found["samples_per_s"], found["samples_per_s_of_data"]) == (10, 40)
        assert found["hours"] == 1
    text = render(compare_text([ROWS[1], row], sample_model(), 144_000), width=WIDE)
    rows = [line.split() for line in text.splitlines() if line.startswith("rtx-4090")]
    assert ["5x", "1.0", "h"] in [row[-3:] for row in rows]


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


def priced(**prices: float) -> list[GpuComparison]:
    """The sample cards at prices per hour, by name with an underscore."""
    return [
        replace(row, price_per_hour=prices.get(row.gpu.name.replace("-", "_")))
        for row in ROWS
    ]


def test_the_cost_is_hours_times_price() -> None:
    # l4: 8 samples/s, 28,800 in an hour; rtx-4090: 10 samples/s, 36,000 in an hour.
    _, l4, ada, _ = priced(l4=0.25, rtx_4090=0.5)
    assert (l4.samples_per_money, ada.samples_per_money) == (115_200, 72_000)
    assert (l4.cost(57_600), ada.cost(36_000)) == (0.5, 0.5)
    for row in (l4, ada):
        assert row.estimate is not None
        assert row.price_per_hour is not None
        assert row.samples_per_money is not None
        for samples in (1, 36_000, 10**9):
            cost = row.cost(samples)
            assert cost == pytest.approx(
                row.estimate.hours(samples) * row.price_per_hour
            )
            assert cost == pytest.approx(samples / row.samples_per_money)


def test_without_a_price_or_a_fit_there_is_no_cost() -> None:
    for row in (ROWS[1], *(priced(t4=1.0, v100_16gb=1.0)[each] for each in (0, 3))):
        assert row.samples_per_money is None
        assert row.cost(100) is None
        with pytest.raises(InputError, match="samples must be a whole number"):
            row.cost(0)


def test_prices_are_a_second_table() -> None:
    text = render(compare_text(priced(t4=0.2, l4=0.25, rtx_4090=5), sample_model()))
    table = text[text.index("samples per 1.00\n") :].splitlines()
    assert [line.split() for line in table[1:5]] == [
        ["t4", "0.200", "-"],
        ["l4", "0.250", "115,200"],
        ["rtx-4090", "5.00", "7,200"],
        ["v100-16gb", "-", "-"],
    ]
    assert "cost:" not in text
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
    assert "per 1.00" not in text_of(0, 1, 2, 3)


def test_a_pass_over_samples_has_a_cost_where_there_is_a_price() -> None:
    rows = priced(t4=0.2, rtx_4090=2.5)
    text = render(compare_text(rows, sample_model(), 360_000), width=100)
    table = text[text.index("samples per 1.00  ") :].splitlines()
    assert [line.split() for line in table[1:5]] == [
        ["t4", "0.200", "-", "-"],
        ["l4", "-", "-", "-"],
        ["rtx-4090", "2.50", "14,400", "25.00"],
        ["v100-16gb", "-", "-", "-"],
    ]
    assert "cost: of one pass over 360,000 samples." in " ".join(text.split())


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ({"l4": 0.4, "rtx_4090": 0.6}, "l4 is the cheapest: 72,000 samples per 1.00."),
        ({"l4": 0.4, "rtx_4090": 0.4}, "rtx-4090 is the cheapest: 90,000"),
        # As many samples per 1.00 on both: the faster one.
        ({"l4": 0.4, "rtx_4090": 0.5}, "rtx-4090 is the cheapest: 72,000"),
        # It does not fit on a t4, however cheap that is.
        ({"t4": 0.01, "l4": 0.4, "rtx_4090": 0.6}, "l4 is the cheapest: 72,000"),
        ({"l4": 0.4}, "l4 is the cheapest of those with a price: 72,000"),
    ],
)
def test_the_cheapest_is_named_beside_the_fastest(
    prices: dict[str, float], said: str
) -> None:
    text = render(compare_text(priced(**prices), sample_model()))
    lines = [line.strip() for line in text.splitlines()]
    fastest = lines.index("rtx-4090 is the fastest: 1.25 times as fast.")
    assert lines[fastest + 1].startswith(said)


def test_nothing_is_called_the_cheapest_of_one_or_where_nothing_fits() -> None:
    rows = priced(t4=0.2, rtx_4090=0.5)
    for few in (rows[2:3], rows[:1], [rows[0], rows[3]]):
        text = render(compare_text(few, sample_model()))
        assert "samples per 1.00" in text
        assert "cheapest" not in text


def test_each_method_has_its_cheapest_card() -> None:
    rows = [
        replace(row, method=method)
        for row in priced(l4=0.4, rtx_4090=0.6)[1:3]
        for method in ("full", "lora")
    ]
    text = render(compare_text(rows, sample_model(), 36_000), width=100)
    for method in ("full", "lora"):
        answer = " ".join(text.split()).split(f"{method}: ", 1)[1]
        assert "l4 is the cheapest: 72,000 samples per 1.00." in answer
        assert f"rtx-4090 {method} 0.600 60,000 0.600" in " ".join(text.split())


def test_the_document_has_prices_and_costs() -> None:
    rows = priced(t4=0.2, rtx_4090=0.5)
    cards = json.loads(compare_json(rows, 36_000))["cards"]
    assert [
        (card["price_per_hour"], card["samples_per_money"], card["cost"])
        for card in cards
    ] == [(0.2, None, None), (None, None, None), (0.5, 72_000, 0.5), (None, None, None)]
    assert cards[2]["cost"] == cards[2]["hours"] * cards[2]["price_per_hour"]
    (card,) = json.loads(compare_json(rows[2:3]))["cards"]
    assert card["samples_per_money"] == 72_000
    assert "cost" not in card
