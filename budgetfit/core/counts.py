"""Whole numbers that people type: samples, tokens, ranks."""

from __future__ import annotations

from typing import Any, Final

from budgetfit.core.errors import InputError

# Beyond these sizes no card helps, and bytes would no longer be counted in 64 bits.
MOST_SAMPLES: Final = 2**24
MOST_PER_STEP: Final = 2**40


def whole_number(
    name: str,
    value: Any,  # noqa: ANN401 - whatever was handed in
    *,
    example: int = 8,
    most: int = MOST_SAMPLES,
) -> int:
    """Return ``value`` if it is a whole number from 1 to ``most``.

    Raises:
        InputError: If it is not; truth values are no numbers here.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            f"{name} must be a whole number of at least 1, for example {example}; "
            f"got {value!r:.80}."
        )
    if value > most:
        raise InputError(
            f"{name} can be {most:,} at most; got {value!r:.80}. Write fewer, for "
            f"example {example}."
        )
    return value
