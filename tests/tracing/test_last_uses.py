"""Frees of what was made outside a run stay beside the items of their own period."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from budgetfit.tracing.depth_extrapolation.last_uses import LastUses

# Two items outside, three of each middle period: the second one runs first, as in a
# backward. One copy of three items comes between them.
WITHOUT: Any = SimpleNamespace(period=np.array([0, 0, 3, 3, 3, 2, 2, 2]))
OWN = np.array([0, 1, 2, 3, 4, 8, 9, 10])


@pytest.mark.parametrize(
    ("item", "period", "place"),
    [
        (6, 2, 9),  # within the first middle period
        (5, 2, 8),  # at its start: after the copy
        (8, 2, 11),  # at its end
        (2, 3, 2),
        (5, 3, 5),  # at the end of the second one: before the copy
    ],
)
def test_a_free_stays_beside_its_period(item: int, period: int, place: int) -> None:
    # ``item`` is its place among all items, this free included.
    freed = LastUses(np.array([0]), np.array([item]), np.array([period]))
    assert freed.places(WITHOUT, OWN).tolist() == [place]
