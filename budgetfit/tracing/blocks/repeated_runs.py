"""Find runs of repeated blocks under a recipe, for depth extrapolation.

A unit is a checkpointed segment of several blocks, or a single block. Units that
repeat, singly or in a pattern of a few, are a run of periods; a shortened model keeps
the first two and the last two periods of each run.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from budgetfit.core.recipe import Segment
    from budgetfit.tracing.blocks.block_signature import BlockPosition, PlacedBlock

KEPT_PERIODS = 4  # the edges, and two in the middle that must be alike
MAX_PERIOD_UNITS = 6
MIN_PERIODS = 5  # one more than is kept


class NotRepeatedError(Exception):
    """The middle of a run does not repeat: the full model must be traced."""


class BlockRun(NamedTuple):
    """Equal periods of repeated blocks: the block paths of each, in order."""

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
        saved, length, count = max(
            _saved(units, start, length) for length in range(1, MAX_PERIOD_UNITS + 1)
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


def _saved(units: Sequence[_Unit], start: int, length: int) -> tuple[int, int, int]:
    """Return (blocks saved, -length, periods) of the repetition from ``start``."""
    end = start + length
    while end < len(units) and _repeats(units, end, length):
        end += 1
    count = (end - start) // length
    if count < MIN_PERIODS or not _repeats(units, start + length, length):
        return 0, -length, 0
    size = sum(len(unit.blocks) for unit in units[start : start + length])
    return (count - KEPT_PERIODS) * size, -length, count


def _repeats(units: Sequence[_Unit], index: int, length: int) -> bool:
    """Whether a unit equals the one a period before, and is next to its predecessor."""
    unit, before = units[index], units[index - 1]
    if unit.key is None or unit.key != units[index - length].key:
        return False
    assert unit.first is not None  # noqa: S101 - it has a key
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
