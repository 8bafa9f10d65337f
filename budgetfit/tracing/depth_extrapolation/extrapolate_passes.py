"""Extrapolate phases and block passes to the trace with copied periods."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from budgetfit.core.step_trace import BlockPass, StepTrace
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.depth_extrapolation.owned_trace import IntArray
from budgetfit.tracing.depth_extrapolation.period_labels import MiddleSpans, Timeline
from budgetfit.tracing.depth_extrapolation.period_matching import PeriodMatch
from budgetfit.tracing.depth_extrapolation.run_layout import (
    FIRST_MIDDLE,
    SECOND_MIDDLE,
    RunLayout,
)


@dataclass(frozen=True, slots=True)
class EventPositions:
    """Maps events and storages of the original trace to the extrapolated one.

    Attributes:
        timeline: Of the original trace without ``removed``.
        pairs: Its spans of the middle periods.
        extra: Number of copies.
        counts: The number of events before each item of the extrapolated timeline,
            before ``inserted``.
        match: Of the middle periods.
        number: The new number of each storage.
        removed, inserted: Where events without a copy were in the original trace, and
            the number of events of the extrapolated one before each.
    """

    timeline: Timeline
    pairs: tuple[MiddleSpans, ...]
    extra: int
    counts: IntArray
    match: PeriodMatch
    number: IntArray
    removed: IntArray
    inserted: IntArray

    def moved(self, event: int, *, starts: bool) -> int:
        """Return the new position of a span's start or end at ``event``."""
        # Copies are inserted before a span that starts there and after one that ends.
        earlier = int(np.searchsorted(self.removed, event))
        position = self.timeline.after(event - earlier)
        copies = self._copied_items(position, starts=starts)
        return int(self.counts[position + copies]) + earlier

    def _copied_items(self, position: int, *, starts: bool) -> int:
        """Return how many items of copies are inserted before a position."""
        return sum(
            self.extra * pair.length
            for pair in self.pairs
            if pair.second < position or (starts and pair.second == position)
        )

    def in_copy(self, row: BlockPass, copy: int) -> tuple[int, int]:
        """Return start and end of a middle period's pass in a copy.

        Raises:
            NotRepeatedError: If the pass is not within the period's events.
        """
        start, end = (
            self.timeline.after(event - int(np.searchsorted(self.removed, event)))
            for event in (row.start, row.end)
        )
        for pair in self.pairs:
            if pair.first <= start <= end <= pair.first + pair.length:
                order = copy if pair.rising else self.extra + 1 - copy
                shift = order * pair.length
                shift += self._copied_items(pair.first, starts=True)
                found = self.counts[[start + shift, end + shift]]
                # What is inserted beside a copy is not inside it.
                found[0] += np.searchsorted(self.inserted, found[0], side="right")
                found[1] += np.searchsorted(self.inserted, found[1], side="left")
                return int(found[0]), int(found[1])
        raise NotRepeatedError("a block's pass is not among its events")

    def storages(self, storage: IntArray, period: IntArray) -> IntArray:
        """Return the new numbers of storages that periods refer to; -1 stays -1."""
        result, some = storage.copy(), storage >= 0
        seen = self.match.resolve(storage[some], period[some])
        result[some] = self.number[seen]
        return result

    def storage_in_copy(self, candidates: Sequence[tuple[int, int]], copy: int) -> int:
        """Return a copy's storage, from the corresponding ones of middle periods.

        ``candidates`` are (storage, period); one may be of the first or last period.

        Raises:
            NotRepeatedError: If none is of a middle period.
        """
        if all(storage < 0 for storage, _ in candidates):
            return -1
        for storage, period in candidates:
            if storage >= 0 and self.match.slots[storage] >= 0:
                found = self.match.storages_in_copies(
                    np.array([copy]),
                    np.array([self.match.allocated_in[storage] - period]),
                    np.array([self.match.slots[storage]]),
                )
                return int(self.number[found[0]])
        raise NotRepeatedError("its blocks take what was made far away")


def extrapolate_passes(
    trace: StepTrace, layout: RunLayout, positions: EventPositions
) -> tuple[BlockPass, ...]:
    """Return all passes, those of copies between those of the middle periods."""
    period_of = layout.kept_period_of_blocks()
    middle = {FIRST_MIDDLE, SECOND_MIDDLE}
    result: list[BlockPass] = []
    earlier: list[BlockPass] = []  # of the middle period that comes first
    later: list[BlockPass] = []
    periods = np.array([period_of.get(row.block, 0) for row in trace.passes], np.int64)
    inputs, outputs = (
        positions.storages(np.array(column, np.int64), periods).tolist()
        for column in (
            [row.input_storage for row in trace.passes],
            [row.output_storage for row in trace.passes],
        )
    )
    for number, row in enumerate(trace.passes):
        period = int(periods[number])
        if period in middle and not later:
            if not earlier or period_of[earlier[0].block] == period:
                earlier.append(row)
            else:
                size = len(earlier)
                later = list(trace.passes[number : number + size])
                result += _copies(layout, positions, earlier, later)
        elif period not in middle:
            earlier, later = [], []
        result.append(
            row._replace(
                start=positions.moved(row.start, starts=True),
                end=positions.moved(row.end, starts=False),
                input_storage=inputs[number],
                output_storage=outputs[number],
            )
        )
    return tuple(result)


def _copies(
    layout: RunLayout,
    positions: EventPositions,
    earlier: Sequence[BlockPass],
    later: Sequence[BlockPass],
) -> Iterator[BlockPass]:
    """Yield the copies of one middle period's passes, in the order of their events.

    Raises:
        NotRepeatedError: If the other middle period has other passes.
    """
    period_of, periods = (
        layout.kept_period_of_blocks(),
        layout.extended(positions.extra),
    )
    period, other = period_of[earlier[0].block], period_of[later[0].block]
    own, others = layout.kept_blocks(period), layout.kept_blocks(other)
    if [own.index(row.block) for row in earlier] != [
        others.index(row.block) if row.block in others else -1 for row in later
    ]:
        raise NotRepeatedError("its middle blocks run in different orders")
    numbers = range(1, positions.extra + 1)
    for copy in numbers if period == FIRST_MIDDLE else reversed(numbers):
        blocks = layout.blocks[int(periods[FIRST_MIDDLE + copy])]
        for row, counterpart in zip(earlier, later, strict=True):
            start, end = positions.in_copy(row, copy)
            yield row._replace(
                block=blocks[own.index(row.block)],
                start=start,
                end=end,
                input_storage=positions.storage_in_copy(
                    [(row.input_storage, period), (counterpart.input_storage, other)],
                    copy,
                ),
                output_storage=positions.storage_in_copy(
                    [(row.output_storage, period), (counterpart.output_storage, other)],
                    copy,
                ),
            )


def extrapolate_blocks(
    trace: StepTrace, layout: RunLayout, extra: int
) -> dict[str, Any]:
    """Return the blocks that ran, joined flags and random blocks, copies included.

    Raises:
        NotRepeatedError: If the middle periods did not run once each, one by one, or
            differ.
    """
    names = trace.block_names
    two, three = (
        tuple(names[block] for block in layout.kept_blocks(period))
        for period in (FIRST_MIDDLE, SECOND_MIDDLE)
    )
    size = len(two)
    at = trace.blocks.index(two[0]) if two[0] in trace.blocks else 0
    once = all(trace.blocks.count(block) == 1 for block in (*two, *three))
    if not once or trace.blocks[at : at + 2 * size] != (*two, *three):
        raise NotRepeatedError("its blocks do not run once each, one by one")
    end = at + size
    draws = [block in trace.random_blocks for block in two]
    if trace.joined[at:end] != trace.joined[end : end + size] or draws != [
        block in trace.random_blocks for block in three
    ]:
        raise NotRepeatedError("its middle blocks are joined, or draw, differently")
    new = [
        [names[block] for block in layout.blocks[period]]
        for period in layout.extended(extra)[SECOND_MIDDLE:-2].tolist()
    ]
    drawing = [b for blocks in new for b, d in zip(blocks, draws, strict=True) if d]
    return {
        "blocks": (
            *trace.blocks[:end],
            *(block for blocks in new for block in blocks),
            *trace.blocks[end:],
        ),
        "joined": (
            *trace.joined[:end],
            *trace.joined[at:end] * extra,
            *trace.joined[end:],
        ),
        "random_blocks": tuple(
            sorted((*trace.random_blocks, *drawing), key=names.index)
        ),
    }
