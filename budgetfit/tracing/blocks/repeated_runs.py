"""Find runs of repeated blocks under a recipe, for depth extrapolation.

A unit is a checkpointed segment of several blocks, or a single block. Units that
repeat, singly or in a pattern of a few, are a run of periods. What a unit leaves in
memory can differ beside another neighbour, so the first unit and at least one at the
end are edges of the run; a shortened model keeps these and two periods between them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from budgetfit.core.recipe import Segment

if TYPE_CHECKING:
    from budgetfit.tracing.blocks.block_signature import BlockPosition, PlacedBlock

KEPT_PERIODS = 4  # the edges, and two in the middle that must be alike
_LENGTHS = range(1, 7)  # of a period, in units


class NotRepeatedError(Exception):
    """The middle of a run does not repeat: the full model must be traced."""


class BlockRun(NamedTuple):
    """Equal periods of repeated blocks: the block paths of each, in order.

    The first and the last are edges: the end and the beginning of such a period.
    """

    container: str
    periods: tuple[tuple[str, ...], ...]

    def kept(self, count: int) -> tuple[int, ...]:
        """Return the ``count`` periods that are kept: the last two and the first."""
        total = len(self.periods)
        return (*range(count - 2), total - 2, total - 1)

    def left_out(self, count: int) -> tuple[str, ...]:
        """Return the blocks that a model of ``count`` periods leaves out."""
        kept = set(self.kept(count))
        return tuple(
            name
            for number, period in enumerate(self.periods)
            if number not in kept
            for name in period
        )


class _Unit(NamedTuple):
    blocks: tuple[str, ...]
    first: BlockPosition | None
    key: Hashable  # None: equal to no other


def find_runs(
    blocks: Sequence[str],
    signatures: Mapping[str, PlacedBlock],
    segments: Sequence[Segment],
) -> tuple[BlockRun, ...]:
    """Return the runs of a model under a recipe, from its first block to its last."""
    units = _units(blocks, signatures, segments)
    runs: list[BlockRun] = []
    start = 0
    while start < len(units):
        saved, length, end = max(
            (_repetition(units, start, length) for length in _LENGTHS),
            key=operator.itemgetter(0),  # of equal ones the first: the shortest period
        )
        place = units[start].first
        if saved <= 0 or place is None:
            start += 1
            continue
        firsts = [start, *range(start + 1, end, length), end]
        periods = tuple(
            tuple(name for unit in units[first:after] for name in unit.blocks)
            for first, after in itertools.pairwise(firsts)
        )
        runs.append(BlockRun(place.container, periods))
        start = end
    return tuple(runs)


def _units(
    blocks: Sequence[str],
    signatures: Mapping[str, PlacedBlock],
    segments: Sequence[Segment],
) -> list[_Unit]:
    """Group the blocks into units; none if a segment's blocks are not consecutive."""
    segment_of = {name: segment for segment in segments for name in segment.blocks}
    units: list[_Unit] = []
    position = 0
    while position < len(blocks):
        segment = segment_of.get(blocks[position])
        names = (blocks[position],) if segment is None else segment.blocks
        if tuple(blocks[position : position + len(names)]) != names:
            return []
        treatment = (
            None
            if segment is None
            else (
                segment.mode,
                segment.saved_ops,
                segment.nested,
                segment.input_on_host,
            )
        )
        members = [signatures[name] for name in names if name in signatures]
        key = None
        if len(members) == len(names) and _consecutive([m.place for m in members]):
            container = members[0].place.container
            key = (container, tuple(m.signature for m in members), treatment)
        units.append(_Unit(names, members[0].place if key else None, key))
        position += len(names)
    return units


def _repetition(
    units: Sequence[_Unit], start: int, length: int
) -> tuple[int, int, int]:
    """Return (blocks saved, length, end) of the repetition from ``start``."""
    end = start + length
    while end < len(units) and _repeats(units, end, length):
        end += 1
    between = (end - start - 2) // length  # periods between the edges
    left_out = max(between + 2 - KEPT_PERIODS, 0)
    size = sum(len(unit.blocks) for unit in units[start + 1 : start + 1 + length])
    return left_out * size, length, end


def _repeats(units: Sequence[_Unit], index: int, length: int) -> bool:
    """Whether a unit equals the one a period before, and is next to its predecessor."""
    unit, before = units[index], units[index - 1]
    if unit.first is None or unit.key != units[index - length].key:
        return False
    return before.first is not None and _consecutive(
        [
            before.first._replace(
                position=before.first.position + len(before.blocks) - 1
            ),
            unit.first,
        ]
    )


def _consecutive(places: Sequence[BlockPosition]) -> bool:
    return all(
        (one.container, one.position + 1) == other
        for one, other in itertools.pairwise(places)
    )
