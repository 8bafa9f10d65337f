"""Rows of blocks that do the same, found under a recipe (tracing T9).

Blocks are grouped into units as the recipe treats them: a segment of several blocks is
one unit, every other block is one. Units that repeat, one by one or in a pattern of a
few, are a run; of a run a shortened twin keeps the first two and the last two periods.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from budgetfit.core.recipe import Segment
    from budgetfit.tracing.blocks.block_signature import Block, Place

KEPT_PERIODS = 4  # the edges, and two in the middle that must be alike
LONGEST_PERIOD = 6
FEWEST_PERIODS = 5  # one more than is kept


class NotRepeatedError(Exception):
    """The middle of a run does not repeat: the whole model must be traced."""


class BlockRun(NamedTuple):
    """Periods that do the same: the paths of the blocks of each, in order."""

    container: str
    periods: tuple[tuple[str, ...], ...]

    def kept(self, count: int) -> tuple[int, ...]:
        """Return which ``count`` periods a twin keeps: the last two and the first."""
        total = len(self.periods)
        return (*range(count - 2), total - 2, total - 1)

    def left_out(self, count: int) -> tuple[str, ...]:
        """Return the blocks that a twin of ``count`` periods does without."""
        kept = set(self.kept(count))
        return tuple(
            name
            for number, period in enumerate(self.periods)
            if number not in kept
            for name in period
        )


class _Unit(NamedTuple):
    blocks: tuple[str, ...]
    first: Place | None
    key: Hashable  # None: like no other


def find_runs(
    blocks: Sequence[str], kinds: Mapping[str, Block], segments: Sequence[Segment]
) -> tuple[BlockRun, ...]:
    """Return the runs of a model under a recipe, from its first block to its last."""
    units = _units(blocks, kinds, segments)
    runs: list[BlockRun] = []
    start = 0
    while start < len(units):
        saved, length, count = max(
            _saved(units, start, length) for length in range(1, LONGEST_PERIOD + 1)
        )
        if saved <= 0:
            start += 1
            continue
        length = -length
        place = units[start].first
        assert place is not None  # noqa: S101 - only units with a key repeat
        periods = tuple(
            tuple(
                name
                for unit in units[start + n * length : start + (n + 1) * length]
                for name in unit.blocks
            )
            for n in range(count)
        )
        runs.append(BlockRun(place.container, periods))
        start += length * count
    return tuple(runs)


def _units(
    blocks: Sequence[str], kinds: Mapping[str, Block], segments: Sequence[Segment]
) -> list[_Unit]:
    """Group the blocks as the recipe treats them; none if it jumps between them."""
    treated = {name: segment for segment in segments for name in segment.blocks}
    units: list[_Unit] = []
    position = 0
    while position < len(blocks):
        segment = treated.get(blocks[position])
        names = (blocks[position],) if segment is None else segment.blocks
        if tuple(blocks[position : position + len(names)]) != names:
            return []
        how = (
            None
            if segment is None
            else (
                segment.mode,
                segment.saved_ops,
                segment.nested,
                segment.input_on_host,
            )
        )
        members = [kinds[name] for name in names if name in kinds]
        key = None
        if len(members) == len(names) and _in_a_row([m.place for m in members]):
            key = (members[0].place.container, tuple(m.kind for m in members), how)
        units.append(_Unit(names, members[0].place if key else None, key))
        position += len(names)
    return units


def _saved(units: Sequence[_Unit], start: int, length: int) -> tuple[int, int, int]:
    """Return (blocks saved, -length, periods) of a repetition that begins here."""
    end = start + length
    while end < len(units) and _repeats(units, end, length):
        end += 1
    count = (end - start) // length
    if count < FEWEST_PERIODS or not _repeats(units, start + length, length):
        return 0, -length, 0
    size = sum(len(unit.blocks) for unit in units[start : start + length])
    return (count - KEPT_PERIODS) * size, -length, count


def _repeats(units: Sequence[_Unit], index: int, length: int) -> bool:
    """Whether a unit is the one a period before, and follows the unit before it."""
    unit, before = units[index], units[index - 1]
    if unit.key is None or unit.key != units[index - length].key:
        return False
    assert unit.first is not None  # noqa: S101 - it has a key
    return before.first is not None and _in_a_row(
        [
            before.first._replace(
                position=before.first.position + len(before.blocks) - 1
            ),
            unit.first,
        ]
    )


def _in_a_row(places: Sequence[Place]) -> bool:
    return all(
        (one.container, one.position + 1) == other
        for one, other in itertools.pairwise(places)
    )
