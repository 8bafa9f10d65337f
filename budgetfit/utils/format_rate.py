"""Format rates for people."""


def rate_text(samples_per_s: float) -> str:
    """Format samples per second with three digits."""
    if samples_per_s >= 100:  # noqa: PLR2004
        return f"{samples_per_s:,.0f}"
    return f"{samples_per_s:.3g}"
