"""What a trace takes a lone random number for, drawn by torch, Python or numpy.

Models draw one to leave a layer out. In a trace all layers run: that takes the most,
and no plan depends on a draw. The largest number runs them where it is compared with
the probability of leaving one out (layerdrop), the smallest where it is compared with
that of keeping one (stochastic depth); where blocks stay out, the second is tried.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LARGEST_CHANCE = 1 - 2**-24
SMALLEST_CHANCE = 2**-24
SMALLEST_NOTE = (
    "random numbers that are drawn one at a time are taken as the smallest, so that no "
    "block is left out"
)
# From then on numbers are drawn: a model may wait for a small one.
MOST_CHANCES = 4096
_DRAWS = (
    (random, "random"),
    (random, "uniform"),
    (np.random, "random"),
    (np.random, "random_sample"),
    (np.random, "rand"),
    (np.random, "uniform"),
)


@dataclass(slots=True)
class Chance:
    """What a lone number is taken for, and how often one was drawn."""

    value: float = LARGEST_CHANCE
    drawn: int = 0


_CHANCE: ContextVar[Chance] = ContextVar("chance", default=Chance())  # noqa: B039


@contextlib.contextmanager
def chance(value: float) -> Iterator[Chance]:
    """Take lone numbers for ``value``, from 0 to 1, in this thread's traces."""
    found = Chance(value)
    token = _CHANCE.set(found)
    try:
        yield found
    finally:
        _CHANCE.reset(token)


def lone_chance() -> float:
    """Return what the number that a model draws now is taken for."""
    found = _CHANCE.get()
    found.drawn += 1
    return found.value


@contextlib.contextmanager
def lone_chances() -> Iterator[None]:
    """Have ``random`` and ``numpy.random`` draw lone chances in this thread."""
    thread, left = threading.get_ident(), [MOST_CHANCES]

    def lone(draw: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found = draw(*args, **kwargs)
        mine = type(found) is float and threading.get_ident() == thread
        if not mine or left[0] <= 0:
            return found
        left[0] -= 1
        low, high = _bounds(*args, **kwargs)
        return low + (high - low) * lone_chance()

    originals = [getattr(module, name) for module, name in _DRAWS]
    for (module, name), draw in zip(_DRAWS, originals, strict=True):
        setattr(module, name, functools.partial(lone, draw))
    try:
        yield
    finally:
        for (module, name), draw in zip(_DRAWS, originals, strict=True):
            setattr(module, name, draw)


def _bounds(
    a: float = 0.0,
    b: float = 1.0,
    *,
    low: float | None = None,
    high: float | None = None,
    **_: object,
) -> tuple[float, float]:
    """Return the bounds of ``uniform``, Python's or numpy's."""
    return (a if low is None else low), (b if high is None else high)
