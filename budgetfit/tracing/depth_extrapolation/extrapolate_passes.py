"""Where phases and blocks' passes lie once copies of a period are put in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.columnar_trace import Ints
from budgetfit.tracing.depth_extrapolation.period_labels import (
    FIRST_MIDDLE,
    SECOND_MIDDLE,
    Items,
    Pair,
)
from budgetfit.tracing.depth_extrapolation.period_matching import Match

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from budgetfit.core.step_trace import BlockPass
    from budgetfit.tracing.depth_extrapolation.columnar_trace import FlatTrace
    from budgetfit.tracing.depth_extrapolation.period_labels import RunLayout


@dataclass(frozen=True, slots=True)
class Places:
    """Positions and storages of the twin's trace, in the longer one.

    ``counts`` holds the number of events before each item of the longer row,
    ``number`` the new number of each storage.
    """

    items: Items
    pairs: tuple[Pair, ...]
    extra: int
    counts: Ints
    match: Match
    number: Ints

    def moved(self, event: int, *, starts: bool) -> int:
        """Return where a stretch that starts or ends at ``event`` now does.

        Copies are put in before a stretch that starts there, after one that ends.
        """
        position = self.items.after(event)
        return int(self.counts[position + self._put_in(position, starts=starts)])

    def _put_in(self, position: int, *, starts: bool) -> int:
        return sum(
            self.extra * pair.length
            for pair in self.pairs
            if pair.second < position or (starts and pair.second == position)
        )

    def in_copy(self, row: BlockPass, copy: int) -> tuple[int, int]:
        """Return where a pass of the earlier middle period lies in a copy.

        Raises:
            NotRepeatedError: If the pass is not within the period's events.
        """
        start, end = self.items.after(row.start), self.items.after(row.end)
        for pair in self.pairs:
            if pair.first <= start <= end <= pair.first + pair.length:
                order = copy if pair.rising else self.extra + 1 - copy
                shift = self._put_in(pair.first, starts=True) + order * pair.length
                return int(self.counts[start + shift]), int(self.counts[end + shift])
        raise NotRepeatedError("a block's pass is not among its events")

    def storage(self, storage: int, unit: int) -> int:
        """Return the storage that a period of the twin means, by its new number."""
        if storage < 0:
            return storage
        seen = self.match.seen_from(np.array([storage]), np.array([unit]))
        return int(self.number[seen[0]])

    def storage_in_copy(self, candidates: Sequence[tuple[int, int]], copy: int) -> int:
        """Return a copy's storage, from what middle periods have in its place.

        ``candidates`` are (storage, period); one may be of the first or last period.

        Raises:
            NotRepeatedError: If none is of a middle period.
        """
        if all(storage < 0 for storage, _ in candidates):
            return -1
        for storage, unit in candidates:
            if storage >= 0 and self.match.slots[storage] >= 0:
                found = self.match.in_copies(
                    np.array([copy]),
                    np.array([self.match.home[storage] - unit]),
                    np.array([self.match.slots[storage]]),
                )
                return int(self.number[found[0]])
        raise NotRepeatedError("its blocks take what was made far away")


def repeated_passes(
    flat: FlatTrace, layout: RunLayout, places: Places
) -> tuple[BlockPass, ...]:
    """Return all passes, those of copies between those of the middle periods."""
    unit_of = layout.unit_of_block()
    middle = {FIRST_MIDDLE, SECOND_MIDDLE}
    result: list[BlockPass] = []
    earlier: list[BlockPass] = []  # of the middle period that comes first
    later: list[BlockPass] = []
    for number, row in enumerate(flat.passes):
        unit = unit_of.get(row.block, 0)
        if unit in middle and not later:
            if not earlier or unit_of[earlier[0].block] == unit:
                earlier.append(row)
            else:
                size = len(earlier)
                later = list(flat.passes[number : number + size])
                result += _copies(layout, places, earlier, later)
        elif unit not in middle:
            earlier, later = [], []
        result.append(
            row._replace(
                start=places.moved(row.start, starts=True),
                end=places.moved(row.end, starts=False),
                input_storage=places.storage(row.input_storage, unit),
                output_storage=places.storage(row.output_storage, unit),
            )
        )
    return tuple(result)


def _copies(
    layout: RunLayout,
    places: Places,
    earlier: Sequence[BlockPass],
    later: Sequence[BlockPass],
) -> Iterator[BlockPass]:
    """Yield the copies of one middle period's passes, in the order of their events.

    Raises:
        NotRepeatedError: If the other middle period has other passes.
    """
    unit_of, periods = layout.unit_of_block(), layout.longer(places.extra)
    unit, other = unit_of[earlier[0].block], unit_of[later[0].block]
    own, others = layout.twin_period(unit), layout.twin_period(other)
    if [own.index(row.block) for row in earlier] != [
        others.index(row.block) if row.block in others else -1 for row in later
    ]:
        raise NotRepeatedError("its middle blocks run in different orders")
    numbers = range(1, places.extra + 1)
    for copy in numbers if unit == FIRST_MIDDLE else reversed(numbers):
        blocks = layout.blocks[int(periods[FIRST_MIDDLE + copy])]
        for row, twin in zip(earlier, later, strict=True):
            start, end = places.in_copy(row, copy)
            yield row._replace(
                block=blocks[own.index(row.block)],
                start=start,
                end=end,
                input_storage=places.storage_in_copy(
                    [(row.input_storage, unit), (twin.input_storage, other)], copy
                ),
                output_storage=places.storage_in_copy(
                    [(row.output_storage, unit), (twin.output_storage, other)], copy
                ),
            )


def repeated_blocks(flat: FlatTrace, layout: RunLayout, extra: int) -> dict[str, Any]:
    """Return which blocks ran, which are joined and which draw, copies included.

    Raises:
        NotRepeatedError: If the middle periods did not run once each, one by one, or
            differ.
    """
    two, three = (layout.twin_period(unit) for unit in (FIRST_MIDDLE, SECOND_MIDDLE))
    size = len(two)
    at = flat.blocks.index(two[0]) if two[0] in flat.blocks else 0
    once = all(flat.blocks.count(block) == 1 for block in (*two, *three))
    if not once or flat.blocks[at : at + 2 * size] != (*two, *three):
        raise NotRepeatedError("its blocks do not run once each, one by one")
    end = at + size
    draws = [block in flat.random_blocks for block in two]
    if flat.joined[at:end] != flat.joined[end : end + size] or draws != [
        block in flat.random_blocks for block in three
    ]:
        raise NotRepeatedError("its middle blocks are joined, or draw, differently")
    new = [layout.blocks[n] for n in layout.longer(extra)[SECOND_MIDDLE:-2].tolist()]
    drawing = [b for blocks in new for b, d in zip(blocks, draws, strict=True) if d]
    return {
        "blocks": (
            *flat.blocks[:end],
            *(block for blocks in new for block in blocks),
            *flat.blocks[end:],
        ),
        "joined": (
            *flat.joined[:end],
            *flat.joined[at:end] * extra,
            *flat.joined[end:],
        ),
        "random_blocks": tuple(sorted((*flat.random_blocks, *drawing))),
    }
