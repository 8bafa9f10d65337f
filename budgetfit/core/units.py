"""Parse memory sizes such as ``24GB`` or ``22.5GiB`` into bytes."""

import operator
import re
from fractions import Fraction
from typing import Final, SupportsIndex

from budgetfit.errors import InputError

# GB is decimal and GiB binary, as in accelerate and on a disk.
_BYTES_PER_UNIT: Final = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BYTES_PER_FOLDED_UNIT: Final = {
    unit.lower(): size for unit, size in _BYTES_PER_UNIT.items()
}
# 18 digits are an exabyte: more is a typo, and int() has a limit too.
_SIZE: Final = re.compile(
    r"\s*(?P<number>[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})"
    r"\s*(?P<unit>[A-Za-z]+)\s*"
)
MOST_BYTES: Final = 1 << 50  # sums of sizes stay far below what an int64 holds
# In "24Gb" the small b after a capital is how bits are written.
_LOOKS_LIKE_BITS: Final = re.compile(r"[A-Z]i?b|b")


def parse_bytes(text: str | SupportsIndex, least_bytes: int = 1) -> int:
    """Return the bytes of a memory size.

    ``GB`` is 10^9 and ``GiB`` is 2^30. Case does not matter, except that a small b
    after a capital ("24Gb") is refused because it is how bits are written. An
    integer is a number of bytes. Parts of a byte are dropped.

    Args:
        text: For example ``"24GB"``, ``"22.5 GiB"`` or ``25_382_879_232``.
        least_bytes: 0 where none is a size, too.

    Returns:
        Bytes.

    Raises:
        InputError: No number, no unit, an unknown unit, less than ``least_bytes``, or
            more than ``MOST_BYTES``.

    >>> parse_bytes("24GB")
    24000000000
    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    size_bytes = _text_bytes(text) if isinstance(text, str) else _integer_bytes(text)
    if size_bytes < least_bytes:
        raise _not_a_size(text)
    if size_bytes > MOST_BYTES:
        raise InputError(
            f"{text!r} is more memory than any machine has: 1024 TiB are the most that "
            'is planned for. Write for example "24GB".'
        )
    return size_bytes


def _text_bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise _not_a_size(text)
    unit = match["unit"]
    if _LOOKS_LIKE_BITS.fullmatch(unit):
        raise InputError(
            f"{text!r} could mean bits. Write bytes with a capital B, "
            f'for example "24GB". Units: {", ".join(_BYTES_PER_UNIT)}.'
        )
    unit_bytes = _BYTES_PER_FOLDED_UNIT.get(unit.lower())
    if unit_bytes is None:
        raise _not_a_size(text)
    # A Fraction is exact where a float would turn 23.64 GiB into a byte too few.
    return int(Fraction(match["number"]) * unit_bytes)


def _integer_bytes(number: SupportsIndex) -> int:
    if isinstance(number, bool):
        raise _not_a_size(number)
    try:
        return operator.index(number)
    except TypeError:
        raise _not_a_size(number) from None


def _not_a_size(given: object) -> InputError:
    shown = repr(given)
    if "\n" in shown:  # a batch of tensors, for one
        shown = f"A {type(given).__name__}"
    return InputError(
        f"{shown} is not a memory size. Write a number above zero and a unit, "
        f'for example "24GB". Units: {", ".join(_BYTES_PER_UNIT)}.'
    )
