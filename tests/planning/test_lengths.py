from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.errors import InputError
from budgetfit.inputs.sample_lengths import summarize_lengths

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=50)


def test_nine_short_samples_and_a_long_one() -> None:
    # 9 x 100 + 1000 = 1900 tokens in 10 x 1000 positions: 81 % padding.
    found = summarize_lengths([100] * 9 + [1000])
    assert (found.samples, found.planned, found.mean) == (10, 1000, 190.0)
    assert found.padding_share == pytest.approx(0.81)
    assert found.notes() == (
        (
            "planned for samples of 1000 tokens; the mean of 10 is 190.0, so padding "
            "all to 1000 spends 81.0% of the positions on padding"
        ),
    )
    # 1000 / 190 x 3.8 samples per second
    assert found.rate_notes(3.8)[0].startswith(
        "batches padded to the mean length alone would make about 20.0 samples per "
        "second instead of 3.8"
    )


def test_longer_samples_than_max_length_are_cut_and_told() -> None:
    found = summarize_lengths({100: 9, 1000: 1}, max_length=200)
    assert (found.planned, found.cut, found.mean) == (200, 1, 110.0)
    assert found.notes()[1] == (
        "1 of 10 samples are longer than max_length 200 and are taken to be cut"
    )


def test_shorter_samples_than_max_length_are_padded_to_it() -> None:
    assert summarize_lengths([100], max_length=400).padding_share == 0.75


def test_equal_lengths_waste_nothing_and_nothing_is_said_of_it() -> None:
    assert summarize_lengths([64, 64]).rate_notes(1.0) == ()


@given(LENGTHS)
def test_a_list_and_its_histogram_are_the_same(lengths: list[int]) -> None:
    histogram = {length: lengths.count(length) for length in lengths}
    assert summarize_lengths(lengths) == summarize_lengths(histogram)


@given(LENGTHS)
def test_padding_and_tokens_fill_all_positions(lengths: list[int]) -> None:
    found = summarize_lengths(lengths)
    positions = len(lengths) * max(lengths)
    assert found.padding_share * positions == pytest.approx(positions - sum(lengths))
    assert 0 <= found.padding_share < 1


@pytest.mark.parametrize("wrong", [[0], [1.5], ["512"], {512: 0}, {512: 0.5}, [True]])
def test_what_is_no_length_is_refused(wrong: Any) -> None:  # noqa: ANN401
    with pytest.raises(InputError, match=r"\{512: 900, 2048: 100\}"):
        summarize_lengths(wrong)


def test_no_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="lengths is empty"):
        summarize_lengths([])
