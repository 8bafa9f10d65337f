"""Numbers that a model draws in Python or numpy to leave layers out, in a trace.

As with ``torch.rand`` (``assumed_values``) a lone one is the largest there is, so that
all layers run: that takes the most, and no plan depends on a draw.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from budgetfit.tracing.assumed_values import LARGEST_CHANCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


@contextlib.contextmanager
def largest_chances() -> Iterator[None]:
    """Have each lone number that this thread draws be the largest possible one."""
    thread, left = threading.get_ident(), [MOST_CHANCES]

    def largest(draw: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found = draw(*args, **kwargs)
        mine = type(found) is float and threading.get_ident() == thread
        if not mine or left[0] <= 0:
            return found
        left[0] -= 1
        low, high = _bounds(*args, **kwargs)
        return low + (high - low) * LARGEST_CHANCE

    originals = [getattr(module, name) for module, name in _DRAWS]
    for (module, name), draw in zip(_DRAWS, originals, strict=True):
        setattr(module, name, functools.partial(largest, draw))
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
