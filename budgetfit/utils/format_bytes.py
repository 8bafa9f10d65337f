"""Format bytes as text in binary units (KiB, MiB, GiB).

Separate from ``core.units``, which parses and raises, so that ``errors`` can use it.
"""

from typing import Final

_STEP: Final = 1024
_UNITS: Final = (
    ("B", 1, 0),
    ("KiB", 2**10, 1),
    ("MiB", 2**20, 1),
    ("GiB", 2**30, 2),
    ("TiB", 2**40, 2),
)


def format_bytes(size_bytes: int) -> str:
    """Format a number of bytes in the smallest binary unit that keeps it below 1024.

    GiB and TiB carry two decimals, KiB and MiB one or, where it is zero, none. A
    difference may be negative.

    >>> format_bytes(24 * 10**9)
    '22.35 GiB'
    >>> format_bytes(-(512 << 20))
    '-512 MiB'
    """
    sign = "-" if size_bytes < 0 else ""
    for unit, unit_bytes, decimals in _UNITS:  # noqa: B007, the last unit has no end
        # Rounded first: 1023.99 MiB must come out as 1.00 GiB, not as 1024 MiB.
        number = f"{abs(size_bytes) / unit_bytes:.{decimals}f}"
        if float(number) < _STEP:
            break
    return f"{sign}{number.removesuffix('.0')} {unit}"


def format_range(low_bytes: int, high_bytes: int) -> str:
    """Format a range of bytes, in the unit of its upper end.

    Without the decimals of small units, as a range is not exact.

    >>> format_range(9770 << 20, 10086 << 20)
    '9.54-9.85 GiB'
    >>> format_range(331 << 20, 331 << 20)
    '331 MiB'
    """
    unit = format_bytes(high_bytes).rpartition(" ")[2]
    unit_bytes, decimals = next(
        (size, 2 * (digits // 2)) for name, size, digits in _UNITS if name == unit
    )
    start, end = (
        f"{size / unit_bytes:.{decimals}f}" for size in (low_bytes, high_bytes)
    )
    return f"{end} {unit}" if start == end else f"{start}-{end} {unit}"
