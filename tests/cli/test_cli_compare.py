"""compare, --why and --lengths."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from budgetfit.cli.parsing import read_lengths
from budgetfit.errors import InputError
from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi
from tests.reporting.sample_plans import (
    sample_cards,
    sample_model,
    sample_plan,
    sample_row,
)


def test_compare_hands_the_cards_to_the_api_and_names_the_answer(
    run: Run, api: FakeApi
) -> None:
    result = run("compare", "gpt2", "--gpus", "t4, l4,rtx-4090", "--batch-size", "6")
    assert result.exit_code == 0
    [(name, args, kwargs)] = api.calls
    assert (name, args) == ("compare", ("gpt2", ["t4", "l4", "rtx-4090"]))
    assert kwargs["batch_size"] == 6
    assert kwargs["precision"] == "auto"
    assert "rtx-4090 is the fastest" in result.stdout


def test_compare_ends_with_3_where_no_card_fits(run: Run, api: FakeApi) -> None:
    api.answers["compare"] = (sample_cards()[:1], sample_model())
    assert run("compare", "gpt2", "--gpus", "t4").exit_code == 3


def test_compare_is_one_json_document(run: Run) -> None:
    result = run("compare", "gpt2", "--gpus", "t4,l4", "--json")
    assert [card["fits"] for card in json.loads(result.stdout)["cards"]][:2] == [
        False,
        True,
    ]


def test_why_explains_one_block_instead_of_the_plan(run: Run, api: FakeApi) -> None:
    api.answers["plan"] = sample_plan(block_table=(sample_row(),))
    result = run("plan", "gpt2", "--why", "layers.3")
    assert result.exit_code == 0
    assert "model.layers.3" in result.stdout
    assert "RECOMMENDED" not in result.stdout
    document = json.loads(run("plan", "gpt2", "--why", "layers.3", "--json").stdout)
    assert document["name"] == "model.layers.3"
    assert run("plan", "gpt2", "--why", "layers.9").exit_code == 2


def test_lengths_come_from_a_file(run: Run, api: FakeApi, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("512\n2048 100\n\n512, 2\n")
    for command in ("plan", "estimate"):
        assert run(command, "gpt2", "--lengths", path).exit_code == 0
    run("compare", "gpt2", "--gpus", "t4", "--lengths", path)
    for _, _, kwargs in api.calls:
        assert kwargs["lengths"] == {512: 3, 2048: 100}


def test_lengths_may_be_given_with_commas(tmp_path: Path) -> None:
    assert read_lengths(Path("512,1024, 512")) == {512: 2, 1024: 1}
    assert read_lengths(Path("512")) == {512: 1}
    with pytest.raises(InputError, match="or lengths with commas: 512,1024"):
        read_lengths(tmp_path / "512,x")


@pytest.mark.parametrize("line", ["a", "1 2 3", "-5", "1.5", "9" * 5000])
def test_a_line_that_is_no_length_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(f"512\n{line}\n")
    with pytest.raises(InputError, match=r"Line 2 of .*512 900"):
        read_lengths(path)


def test_a_file_of_lengths_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Cannot read lengths"):
        read_lengths(tmp_path / "no.txt")


def test_compare_hands_methods_and_adapters_to_the_api(run: Run, api: FakeApi) -> None:
    words = "--gpus t4 --methods full,lora --lora-r 8 --image-size 64 --text-only"
    assert run("compare", "m", *words.split()).exit_code == 0
    [(_, _, kwargs)] = api.calls
    assert kwargs["methods"] == ["full", "lora"]
    assert (kwargs["method"], kwargs["lora_r"]) == (None, 8)
    assert (kwargs["image_size"], kwargs["text_only"]) == ("64", True)


def test_a_table_of_methods_is_wide_enough_for_whole_names(
    run: Run, api: FakeApi
) -> None:
    rows = tuple(
        replace(row, method=method)
        for row in sample_cards()
        for method in ("full", "qlora")
    )
    api.answers["compare"] = (rows, sample_model())
    words = ("compare", "m", "--gpus", "t4", "--methods", "full,qlora")
    lines = run(*words, "--samples", 10**8).stdout.splitlines()
    assert 80 < max(map(len, lines)) <= 105
    for name in ("rtx-4090", "v100-16gb"):
        assert sum(line.startswith(name + " ") for line in lines) == 2
    assert any("2,778 h (115.7 days)" in line for line in lines)


def test_hours_are_told_for_a_number_of_samples(run: Run) -> None:
    # The sample plan makes 10 samples in a second.
    said = "36,000 samples: 1.0 h"
    assert said in run("plan", "m", "--samples", 36_000).stdout
    assert said in run("estimate", "m", "--samples", 36_000).stdout
    for words in (("plan", "m"), ("estimate", "m")):
        document = json.loads(run(*words, "--samples", 36_000, "--json").stdout)
        assert (document["samples"], document["hours"]) == (36_000, 1.0)
    words = ("compare", "m", "--gpus", "t4", "--samples", 36_000, "--json")
    cards = json.loads(run(*words).stdout)["cards"]
    assert [card["hours"] for card in cards][2:] == [1.0, None]


@pytest.mark.parametrize(
    "words", ["plan m", "estimate m", "compare m --gpus t4", "show plan.json"]
)
def test_a_number_of_samples_that_is_none_is_refused_before_the_work(
    run: Run, api: FakeApi, words: str
) -> None:
    result = run(*words.split(), "--samples", 0)
    assert result.exit_code == 2
    assert "samples must be a whole number of at least 1" in result.stderr
    assert not api.calls


@pytest.mark.parametrize(
    "words",
    [
        "--price rtx-4090=0.4 --price t4=.35",
        "--price rtx-4090=0.40,t4=0.35",
        "--price RTX4090=0.4,t4=0.35 --price rtx-4090=0.40",
    ],
)
def test_prices_are_handed_to_the_api_by_card(
    run: Run, api: FakeApi, words: str
) -> None:
    asked = ("compare", "m", "--gpus", "t4,l4,rtx-4090", *words.split())
    assert run(*asked).exit_code == 0
    assert api.calls[0][2]["prices"] == {"rtx-4090": 0.4, "t4": 0.35}


def test_what_1_buys_and_what_a_pass_costs_are_printed(run: Run, api: FakeApi) -> None:
    rows = tuple(replace(row, price_per_hour=0.5) for row in sample_cards())
    api.answers["compare"] = (rows, sample_model())
    words = ("compare", "m", "--gpus", "l4,rtx-4090", "--price", "l4=0.5,rtx-4090=0.5")
    result = run(*words, "--samples", 36_000)
    assert "rtx-4090 is the cheapest: 72,000 samples per 1.00." in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    cards = json.loads(run(*words, "--samples", 36_000, "--json").stdout)["cards"]
    assert [card["cost"] for card in cards] == [None, 0.625, 0.5, None]


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ("0.35", "--price takes CARD=PRICE per hour"),
        ("", "--price takes CARD=PRICE per hour"),
        ("l4=0,35", "got '35'"),
        ("l4=0", "price of l4 must be a number above 0"),
        ("l4=-1", "got '-1'"),
        ("l4=nan", "got 'nan'"),
        ("l4=inf", "got 'inf'"),
        ("l4=$1", "got '$1'"),
        ("l4=", "got ''"),
        ("=1", "'' is not in the card table"),
        ("l5=1", "'l5' is not in the card table"),
        ("rtx-4090=1", "rtx-4090 has a price, but the cards to compare are t4, l4"),
        ("l4=0.7,NVIDIA L4=0.8", "l4 has two prices per hour, 0.7 and 0.8"),
    ],
)
def test_prices_that_are_none_are_refused_before_the_work(
    run: Run, api: FakeApi, prices: str, message: str
) -> None:
    result = run("compare", "m", "--gpus", "t4,l4", f"--price={prices}")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not api.calls
