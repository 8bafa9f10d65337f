"""Sizes: what a user may write, what is refused and how sizes are printed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.core.units import MOST_BYTES, parse_bytes
from budgetfit.errors import InputError
from budgetfit.utils.format_bytes import format_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1B", 1),
        ("3kB", 3_000),
        ("5MB", 5_000_000),
        ("24GB", 24_000_000_000),
        ("2TB", 2_000_000_000_000),
        ("3KiB", 3 * 1024),
        ("5MiB", 5 * 1024**2),
        ("24GiB", 25_769_803_776),
        ("2TiB", 2 * 1024**4),
    ],
)
def test_each_unit_means_its_power_of_1000_or_of_1024(
    text: str, size_bytes: int
) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["24GB", "24gb", "24 GB", "  24\tGB ", "24.0GB"])
def test_case_and_spaces_do_not_matter(text: str) -> None:
    assert parse_bytes(text) == 24 * 10**9


def test_decimals_are_exact_and_parts_of_a_byte_are_dropped() -> None:
    # 23.64 * 2^30 = 25,383,256,719.36 bytes; 0.29 GB = 290,000,000 exactly, although
    # int(0.29 * 10**9) is one less.
    assert parse_bytes("23.64 GiB") == 25_383_256_719
    assert parse_bytes("0.29GB") == 290_000_000
    assert parse_bytes(".5 GiB") == 2**29


def test_an_integer_is_a_number_of_bytes() -> None:
    assert parse_bytes(25_382_879_232) == 25_382_879_232


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "   ", "24", "GB", "-1GB", "+1GB", "0GB", "0.0 GiB", "0.4B", "nan GB"),
        *("inf GB", "1e400GB", "1e3GB", "24 G", "24Gi", "24 gigabytes", "22,5GB"),
        *("24GB 1", "1_000GB", "٢٤GB", "9" * 5000 + "GB"),
        *(True, False, 0, -1, 24.0, None, [24], b"24GB"),
    ],
)
def test_what_is_no_size_is_refused_with_an_example(wrong: Any) -> None:
    with pytest.raises(InputError, match="is not a memory size") as caught:
        parse_bytes(wrong)
    assert str(caught.value) == (
        f"{wrong!r} is not a memory size. Write a number above zero and a unit, for "
        'example "24GB". Units: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.'
    )


@pytest.mark.parametrize("bits", ["24Gb", "24Gib", "24Mb", "24b", "24 Kb"])
def test_what_could_mean_bits_is_refused(bits: str) -> None:
    with pytest.raises(InputError, match="could mean bits"):
        parse_bytes(bits)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (512 * 2**20, "512 MiB"),
        (13_390_315, "12.8 MiB"),
        (24 * 10**9, "22.35 GiB"),
        (2**30, "1.00 GiB"),
        (2**30 - 1, "1.00 GiB"),  # 1023.99... MiB must not come out as 1024 MiB
        (5 * 2**40 // 2, "2.50 TiB"),
        (2**50, "1024.00 TiB"),  # there is no larger unit
        (-3 * 1024, "-3 KiB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_keeps_them_below_1024(
    size_bytes: int, text: str
) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(min_value=1, max_value=MOST_BYTES))
def test_what_is_printed_can_be_typed_back_and_means_nearly_the_same(
    size_bytes: int,
) -> None:
    # One decimal of a number of at least 1: off by at most 5 %.
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.051)


@given(st.integers(1, 2**60), st.sampled_from(["B", "kB", "GB", "KiB", "GiB"]))
def test_whole_numbers_of_a_unit_are_exact(count: int, unit: str) -> None:
    bytes_of_one = parse_bytes(f"1{unit}")
    if len(str(count)) <= 18 and count * bytes_of_one <= MOST_BYTES:
        assert parse_bytes(f"{count}{unit}") == count * bytes_of_one
