"""The grid of batch sizes to try, and the largest batch that fits, in a few tries."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Final

from budgetfit.core.validation import MAX_SAMPLES, MAX_TRACED_SAMPLES

# Upper end of the grid: of small models the time per sample falls until there.
LARGEST_BATCH_SIZE: Final = MAX_SAMPLES
# The same where each size is traced for itself.
LARGEST_TRACED_SIZE: Final = MAX_TRACED_SAMPLES
# Multiples of 8 are tried up to here, then multiples of 16 up to twice as much, and so
# on: eight between a power of two and the next.
_EVERY_EIGHT_UP_TO: Final = 128


def largest_fitting_batch(
    fits: Callable[[int], bool], smallest: int = 1, largest: int = LARGEST_BATCH_SIZE
) -> int:
    """Return the largest batch size that fits, 0 if none: doubling, then bisection."""
    fitting, failing = _doubled(fits, smallest, largest)
    return bisect(fits, fitting, failing)


def fitting_batch_sizes(
    fits: Callable[[int], bool], smallest: int = 1, largest: int = LARGEST_BATCH_SIZE
) -> list[int]:
    """Return the batch sizes of the grid that fit, of those in a range."""
    fitting, failing = _doubled(fits, smallest, largest)
    if not fitting:
        return []
    sizes = [size for size in batch_size_grid(failing) if size >= smallest]
    between = bisect_right(sizes, fitting) - 1, bisect_left(sizes, failing)
    return sizes[: bisect(lambda index: fits(sizes[index]), *between) + 1]


def _doubled(
    fits: Callable[[int], bool], smallest: int, largest: int
) -> tuple[int, int]:
    """Return a size that fits, or 0, and twice as much, which does not."""
    fitting, failing = 0, smallest
    while failing <= largest and fits(failing):
        fitting, failing = failing, failing * 2
    return fitting, min(failing, largest + 1)


def bisect(fits: Callable[[int], bool], fitting: int, failing: int) -> int:
    """Return the largest that fits by bisection, given one that does and one not."""
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting


def largest_fitting(fits: Callable[[int], bool], bound: int) -> int:
    """Return the largest number up to ``bound`` that fits; usually close to it."""
    return bisect(fits, *fitting_below(fits, bound))


def fitting_below(fits: Callable[[int], bool], bound: int) -> tuple[int, int]:
    """Return a number that fits, or 0, and a larger one that does not."""
    # Goes down from the bound in doubling steps.
    too_many, step, enough = bound + 1, 1, bound
    while enough > 0 and not fits(enough):
        too_many, enough = enough, max(0, enough - step)
        step *= 2
    return enough, too_many


def batch_size_grid(largest_fitting_batch: int) -> list[int]:
    """Return the grid: all sizes up to 8, then multiples of 8, 16, 32 and so on."""
    sizes = list(range(1, min(8, largest_fitting_batch) + 1))
    size, stride, stride_ends = 16, 8, _EVERY_EIGHT_UP_TO
    while size <= largest_fitting_batch:
        sizes.append(size)
        if size == stride_ends:
            stride, stride_ends = stride * 2, stride_ends * 2
        size += stride
    return sizes
