"""Pareto filter of DP labels in three dimensions."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Marks = NDArray[np.bool_]

_MOST: Final = np.iinfo(np.int64).max
_LAGS: Final = (1, 2, 3, 4, 6, 8, 12, 16)


def pareto_indices(backward: Ints, cost: Ints, forward: Ints) -> NDArray[np.intp]:
    """Return the indices of the labels that no other equals or beats in all three."""
    # Sorted by ``backward``, then ``cost``, then ``forward``. Of labels that are equal
    # in all three the first is kept.
    lead = forward - backward
    if lead.size and np.all(lead == lead[0]):  # one sort key less
        order = np.lexsort((cost, backward))
    else:
        order = np.lexsort((forward, cost, backward))
    # Only earlier labels in this order can dominate one, and their backward need is
    # never larger: two dimensions remain. The first filters are cheap.
    order = order[~_dominated_by_least(cost[order], forward[order])]
    order = order[~_dominated_by_least(forward[order], cost[order])]
    if np.all(np.diff(cost[order]) < 0):
        return order  # usual where forward need follows from backward need
    order = order[~_dominated_by_near(cost[order], forward[order])]
    return order[~_dominated_by_earlier(cost[order], forward[order])]


def _dominated_by_least(first: Ints, second: Ints) -> Marks:
    """Mark those dominated by the earlier one of minimum ``first``."""
    if first.size == 0:
        return np.zeros(0, np.bool_)
    least = np.minimum.accumulate(first)
    is_new_least = np.append(True, first[1:] < least[:-1])
    holder = np.maximum.accumulate(np.where(is_new_least, np.arange(first.size), 0))
    before = holder[:-1]
    dominated = np.zeros(first.size, np.bool_)
    dominated[1:] = (first[before] <= first[1:]) & (second[before] <= second[1:])
    return dominated


def _dominated_by_near(first: Ints, second: Ints) -> Marks:
    """Mark those dominated by one of a few just before them."""
    dominated = np.zeros(first.size, np.bool_)
    for lag in _LAGS:
        dominated[lag:] |= (first[:-lag] <= first[lag:]) & (
            second[:-lag] <= second[lag:]
        )
    return dominated


def _dominated_by_earlier(first: Ints, second: Ints) -> Marks:
    """Mark exactly those dominated by any earlier one."""
    # Bottom up: at each width the right half of a range is compared with its left half,
    # all ranges at once. Every pair meets at exactly one width.
    size = first.size
    padded = 1 << max(0, size - 1).bit_length()
    # Even ranks: at equal ``first`` the left half sorts before the odd right half.
    ranks = np.full(padded, 2 * size, np.int64)
    ranks[:size] = 2 * np.unique(first, return_inverse=True)[1]
    seconds = np.append(second, np.full(padded - size, _MOST))
    dominated = np.zeros(padded, np.bool_)
    width = 2
    while width <= padded:
        ranges = ranks.reshape(padded // width, width).copy()
        ranges[:, width // 2 :] += 1
        order = np.argsort(ranges, axis=1)
        is_right = order >= width // 2
        ordered = np.take_along_axis(seconds.reshape(order.shape), order, axis=1)
        least_left = np.minimum.accumulate(np.where(is_right, _MOST, ordered), axis=1)
        found = np.zeros(order.shape, np.bool_)
        np.put_along_axis(found, order, is_right & (least_left <= ordered), axis=1)
        dominated |= found.ravel()
        width *= 2
    return dominated[:size]
