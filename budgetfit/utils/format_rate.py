"""Format rates for people."""

from typing import Final

_THREE_DIGITS: Final = 100


def rate_text(samples_per_s: float) -> str:
    """Format samples per second with three digits."""
    if samples_per_s >= _THREE_DIGITS:
        return f"{samples_per_s:,.0f}"
    return f"{samples_per_s:.3g}"
