"""Validate arguments: samples, tokens, ranks, pixels, batch sizes, the objective."""

import operator
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from budgetfit.errors import InputError

# Beyond these sizes no GPU helps, and bytes would overflow 64 bits.
MAX_SAMPLES: Final = 2**24
MAX_TRACED_SAMPLES: Final = 2**16  # integers of a batch are real, in host memory
MAX_BATCH_SIZE: Final = 2**40
MAX_PIXELS: Final = 2**14  # along each side
_MOST_DIGITS: Final = 18
OBJECTIVES: Final = ("throughput", "batch_size", "memory", "length")

# Pixels of a square, height and width, or both as text: "336x448".
ImageSize: TypeAlias = int | str | tuple[int, int] | None


def python_number(value: Any) -> Any:  # noqa: ANN401 - any user input
    """Return a number of numpy, torch or another library as Python's, or ``value``."""
    # Whole is what Python's ``operator.index`` takes. In lists and tuples, too.
    if isinstance(value, (bool, int, float, str)):
        # numpy's float64 is a float, and prints otherwise.
        return float(value) if isinstance(value, float) else value
    if isinstance(value, (list, tuple)):
        numbers = [python_number(each) for each in value]
        return numbers if isinstance(value, list) else tuple(numbers)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        try:
            return value.item()
        except RuntimeError:  # a tensor without a value
            return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def is_whole(text: str) -> bool:
    """Whether a text is a whole number, and none of thousands of digits."""
    digits = text.strip()  # int() takes spaces, and 4,300 digits at most
    return digits.isdecimal() and len(digits) <= _MOST_DIGITS


def set_python_numbers(settings: object, names: Iterable[str]) -> None:
    """Set fields of a frozen dataclass to ``python_number`` of what they are."""
    for name in names:
        value = getattr(settings, name)
        number = python_number(value)
        if number is not value:
            object.__setattr__(settings, name, number)


def check_positive_int(
    name: str,
    value: object,
    *,
    example: int = 8,
    most: int = MAX_SAMPLES,
) -> int:
    """Return ``value`` if it is a whole number from 1 to ``most``."""
    value = python_number(value)
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


def check_batch(
    batch_size: int | None, effective_batch_size: int | None, ranks: int = 1
) -> None:
    """Check batch sizes before anything is traced; the effective one is each rank's.

    Raises:
        InputError: If a size is below 1 or the micro-batch does not divide the
            effective batch.
    """
    for name, value, most in (
        ("batch_size", batch_size, MAX_SAMPLES),
        ("effective_batch_size", effective_batch_size, MAX_BATCH_SIZE),
    ):
        if value is not None:
            check_positive_int(name, value, most=most)
    if batch_size and effective_batch_size and effective_batch_size % batch_size:
        smaller = range(batch_size, 0, -1)
        divisor = next(size for size in smaller if effective_batch_size % size == 0)
        ours = f" over {ranks} ranks ({effective_batch_size} on each)"
        share = ours if ranks > 1 else ""
        raise InputError(
            f"batch_size {batch_size} does not divide effective_batch_size "
            f"{effective_batch_size * ranks}{share}, and the effective batch is never "
            f"changed. The next smaller one that does is {divisor}."
        )


def check_objective(objective: str) -> None:
    """Check the objective's name."""
    if objective not in OBJECTIVES:
        raise InputError(
            f"{objective!r} is not an objective. Use one of: {', '.join(OBJECTIVES)}."
        )


def check_samples(samples: int | None) -> None:
    """Check the number of samples of an epoch."""
    if samples is not None:
        check_positive_int("samples", samples, example=50_000, most=MAX_BATCH_SIZE)


def parse_image_size(value: object) -> tuple[int, int]:
    """Return height and width in pixels of ``448``, ``(336, 448)`` or ``"336x448"``.

    Raises:
        InputError: If it is none of these; bool is refused.
    """
    value = python_number(value)
    sides: Any = value
    if isinstance(value, str):
        parts = value.lower().split("x")
        sides = [int(part) if is_whole(part) else None for part in parts]
    elif isinstance(value, int):
        sides = [value]
    known = isinstance(sides, (list, tuple)) and len(sides) in (1, 2)
    if not known or not all(map(_is_side, sides)):
        raise InputError(
            "image_size must be pixels, for example 448, or height and width, "
            f"(336, 448) (--image-size 336x448); got {value!r:.80}."
        )
    return sides[0], sides[-1]


def format_image_size(value: ImageSize) -> str:
    """Format height and width of images: ``"336x448"``."""
    height, width = parse_image_size(value)
    return f"{height}x{width}"


def _is_side(value: object) -> bool:
    side = None if isinstance(value, bool) else value
    return isinstance(side, int) and 1 <= side <= MAX_PIXELS
