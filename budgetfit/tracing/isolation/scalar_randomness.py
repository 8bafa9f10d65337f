"""Pin scalar random draws in a trace: LayerDrop and stochastic depth drop no layer.

Models draw a scalar from torch, ``random`` or numpy to skip a layer. In a trace all
layers run: that takes the most memory, and no plan depends on a draw. The largest value
runs them if it is compared with the probability of dropping (LayerDrop), the smallest
if it is compared with that of keeping (stochastic depth). If blocks are still skipped
with the first, the second is tried.
"""

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

LARGEST_DRAW = 1 - 2**-24
SMALLEST_DRAW = 2**-24
SMALLEST_DRAW_NOTE = (
    "random numbers that are drawn one at a time are taken as the smallest, so that no "
    "block is left out"
)
# Further draws are random: a model may loop until it draws a small number.
MAX_PINNED_DRAWS = 4096
_DRAWS = (
    (random, "random"),
    (random, "uniform"),
    (np.random, "random"),
    (np.random, "random_sample"),
    (np.random, "rand"),
    (np.random, "uniform"),
)


@dataclass(slots=True)
class ScalarDraw:
    """The pinned value of scalar draws, and how many there were."""

    value: float = LARGEST_DRAW
    drawn: int = 0


_SCALAR_DRAW: ContextVar[ScalarDraw] = ContextVar("scalar_draw", default=ScalarDraw())  # noqa: B039


@contextlib.contextmanager
def scalar_draws_as(value: float) -> Iterator[ScalarDraw]:
    """Pin scalar draws in this thread's traces to ``value``, from 0 to 1."""
    found = ScalarDraw(value)
    token = _SCALAR_DRAW.set(found)
    try:
        yield found
    finally:
        _SCALAR_DRAW.reset(token)


def pinned_draw() -> float:
    """Return the pinned value, and count the draw."""
    found = _SCALAR_DRAW.get()
    found.drawn += 1
    return found.value


@contextlib.contextmanager
def pinned_scalar_draws() -> Iterator[None]:
    """Make ``random`` and ``numpy.random`` return pinned scalars in this thread."""
    thread, left = threading.get_ident(), [MAX_PINNED_DRAWS]

    def pinned(draw: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        found = draw(*args, **kwargs)
        mine = type(found) is float and threading.get_ident() == thread
        if not mine or left[0] <= 0:
            return found
        left[0] -= 1
        low, high = _bounds(*args, **kwargs)
        return low + (high - low) * pinned_draw()

    with contextlib.ExitStack() as stack:
        for module, name in _DRAWS:
            draw = functools.partial(pinned, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, draw))
        try:
            yield
        finally:
            left[0] = 0  # of names that were imported meanwhile


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
