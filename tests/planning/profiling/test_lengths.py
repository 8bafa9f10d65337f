"""Lengths of samples, and the batches that are drawn from them."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.core.samples.sample_lengths import summarize_lengths
from budgetfit.errors import InputError

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=50)


def test_lengths_may_be_whole_numbers_of_numpy() -> None:
    found = summarize_lengths(np.array([512, 1024, 512]))
    assert found.counts == ((512, 2), (1024, 1))
    assert all(type(number) is int for row in found.counts for number in row)


def test_nine_short_samples_and_a_long_one() -> None:
    found = summarize_lengths([100] * 9 + [1000])
    assert (found.samples, found.planned, found.mean) == (10, 1000, 190.0)
    assert (found.shortest, found.vary) == (100, True)
    assert found.notes() == (
        (
            "planned for samples of 100 to 1000 tokens (the mean of 10 is 190.0) in "
            "batches that are padded to their longest"
        ),
    )


def test_longer_samples_than_max_length_are_cut_and_told() -> None:
    found = summarize_lengths({100: 9, 1000: 1}, max_length=200)
    assert (found.planned, found.cut, found.mean) == (200, 1, 110.0)
    assert found.notes()[1] == (
        "1 of 10 samples are longer than max_length 200 and are taken to be cut"
    )


def test_equal_lengths_do_not_vary() -> None:
    found = summarize_lengths([64, 64])
    assert not found.vary
    assert found.notes() == ("planned for samples of 64 tokens",)


@given(LENGTHS)
def test_a_list_and_its_histogram_are_the_same(lengths: list[int]) -> None:
    histogram = {length: lengths.count(length) for length in lengths}
    assert summarize_lengths(lengths) == summarize_lengths(histogram)


@given(LENGTHS, st.integers(1, 64), st.integers(0, 10))
def test_drawn_lengths_occur_and_repeat_with_the_seed(
    lengths: list[int], batch_size: int, seed: int
) -> None:
    found = summarize_lengths(lengths)
    drawn = found.draw(batch_size, 2, 20, seed)
    assert drawn == found.draw(batch_size, 2, 20, seed)
    assert (len(drawn), {len(row) for row in drawn}) == (20, {2})
    assert {length for row in drawn for length in row} <= set(lengths)


def test_a_batch_is_as_long_as_its_longest_sample() -> None:
    # One of ten is long: a batch of 4 is long in 1 - 0.9^4 = 34 % of all cases.
    found = summarize_lengths({100: 9, 1000: 1})
    counted = Counter(row[0] for row in found.draw(4, 1, 20_000, seed=0))
    assert counted[1000] / 20_000 == pytest.approx(1 - 0.9**4, abs=0.01)


@pytest.mark.parametrize("wrong", [[0], [1.5], ["512"], {512: 0}, {512: 0.5}, [True]])
def test_what_is_no_length_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"\{512: 900, 2048: 100\}"):
        summarize_lengths(wrong)


@pytest.mark.parametrize("wrong", [512, 3.5, "64-512", Path("a.txt"), np.array(64)])
def test_what_is_no_list_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"lengths must be a list of lengths such as"):
        summarize_lengths(wrong)


def test_counts_of_pandas_are_samples_by_length() -> None:
    """Iterated over they are the counts alone, which would be taken for lengths."""
    pandas = pytest.importorskip("pandas")
    lengths = pandas.Series([512, 1024, 512])
    both = (summarize_lengths(lengths), summarize_lengths(lengths.value_counts()))
    assert both == (summarize_lengths([512, 1024, 512]),) * 2


def test_no_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="lengths is empty"):
        summarize_lengths([])


def test_only_lengths_that_occur_and_what_they_are_padded_to_are_traced() -> None:
    found = summarize_lengths({100: 9, 1024: 1})
    assert found.multiples == (64, 128, 256, 512, 1024)
    assert found.alike() == [[128, 256, 512, 1024], [100]]
