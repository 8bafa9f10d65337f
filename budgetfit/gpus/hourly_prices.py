"""Prices per hour of GPUs, as users give them."""

import math
from collections.abc import Iterable, Sequence

from budgetfit.errors import InputError
from budgetfit.gpus.table import Gpu, find_gpu


def hourly_prices(
    given: Iterable[tuple[str, float | str]], gpus: Sequence[Gpu]
) -> dict[str, float]:
    """Return the price per hour of each GPU that has one, by its canonical name.

    ``given``: names that ``find_gpu`` resolves, each with money per hour, all in one
    currency: a number, or one as text.

    Raises:
        InputError: A name is unknown or none of ``gpus``, a price is not a finite
            number above 0, or a GPU has two different prices.

    >>> hourly_prices([("RTX 4090", "0.35")], [find_gpu("rtx-4090")])
    {'rtx-4090': 0.35}
    """
    compared = dict.fromkeys(gpu.name for gpu in gpus)
    prices: dict[str, float] = {}
    for text, value in given:
        name = find_gpu(text).name
        if name not in compared:
            raise InputError(
                f"{name} has a price, but the cards to compare are "
                f"{', '.join(compared)}. Add it to them (--gpus), or leave its price "
                "out."
            )
        price = _number(value)
        if not 0 < price < math.inf:
            raise InputError(
                f"The price of {name} must be a number above 0, in money per hour, "
                f"for example 0.35; got {value!r:.80}."
            )
        if prices.setdefault(name, price) != price:
            raise InputError(
                f"{name} has two prices per hour, {prices[name]:g} and {price:g}. "
                "Give one."
            )
    return prices


def _number(value: float | str) -> float:
    """Return the number; NaN where it is none."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
