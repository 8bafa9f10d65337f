"""Every card of budgetfit's table can be imitated, and is found by its names."""

from operator import attrgetter
from pathlib import Path

import pytest

from budgetfit.gpus.table import all_gpus
from tests.accuracy.nulldriver.cards import all_cards, find_card

ROW = """
[[gpu]]
name = "{}"
title = "Maker {}"
also = {}
compute_capability = [8, 9]
sm_count = {}
threads_per_sm = 1536
total_bytes = {}
"""
TABLE = (
    ROW.format("small", "Small", ["one", "two"], 10, 1_000)
    + ROW.format("large", "Large", ["one"], 10, 2_000)
    + ROW.format("wide", "Wide", ["two"], 11, 1_000)
)
FIELDS = attrgetter(
    *("name", "compute_capability", "sm_count", "threads_per_sm", "total_bytes")
)


def test_a_card_is_what_the_card_table_of_budgetfit_says() -> None:
    assert [*map(FIELDS, all_cards())] == [*map(FIELDS, all_gpus())]


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_a_canonical_name_means_its_own_row(gpu: object) -> None:
    name = getattr(gpu, "name", "")
    assert find_card(name).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("h100", "h100-80gb"),
        ("A100-40GB", "a100-40gb"),
        ("Tesla T4", "t4"),
        ("b200", "b200"),
    ],
)
def test_other_ways_to_write_a_card_find_it(text: str, name: str) -> None:
    assert find_card(text).name == name


def test_a_name_of_cards_that_differ_in_memory_means_the_largest(
    tmp_path: Path,
) -> None:
    cards = all_cards(_table(tmp_path))
    assert find_card("one", cards).name == "large"
    assert find_card("a100").name == "a100-80gb"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("two", "several cards: small, wide"),  # that compute differently
        ("s4", "'s4'; the cards are small, large, wide"),
    ],
)
def test_a_name_that_is_no_card_is_refused_with_those_there_are(
    tmp_path: Path, name: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        find_card(name, all_cards(_table(tmp_path)))


def test_the_settings_of_a_card_are_the_numbers_that_the_null_driver_reads() -> None:
    assert find_card("rtx-5090").settings == {
        "NULLCUDA_GPU": "rtx-5090",
        "NULLCUDA_CC": "120",
        "NULLCUDA_SM": "170",
        "NULLCUDA_THREADS_PER_SM": "1536",
        "NULLCUDA_BYTES": "33680457728",
    }


def _table(folder: Path) -> Path:
    path = folder / "gpus.toml"
    path.write_text(TABLE, encoding="utf-8")
    return path
