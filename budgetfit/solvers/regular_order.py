"""Put what a plan does with equal blocks in order: one treatment after the other.

Where blocks are equal, plans differ in their order only: recomputing blocks 0, 2 and 3
takes as long as recomputing blocks 0 to 2. A plan in order is easier to read, and its
step is traced in a shortened model, in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Final, NamedTuple, TypeAlias

from budgetfit.core.block_profile import BlockProfile, ChainProfile
from budgetfit.core.recipe import Segment, SegmentMode
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.problem import Problem, Solution, describe

MIN_EQUAL_BLOCKS: Final = 4


class Treatment(NamedTuple):
    """What is done with the blocks of a segment: its fields but for the blocks."""

    mode: SegmentMode
    saved_ops: tuple[str, ...]
    nested: bool
    input_on_host: bool

    @classmethod
    def of(cls, segment: Segment) -> Treatment:
        """Return a segment's treatment."""
        return cls(*(getattr(segment, name) for name in cls._fields))

    def segment(self, blocks: tuple[str, ...]) -> Segment:
        """Return the segment of some blocks with this treatment."""
        return Segment(blocks, **self._asdict())


# A treatment, None for blocks that are kept, and the length of each of its segments.
Group: TypeAlias = tuple[Treatment | None, tuple[int, ...]]


def in_regular_order(problem: Problem, solution: Solution) -> Solution:
    """Return the solution with equal blocks in order, where that is in the limit."""
    # It takes no longer, and its peak may be higher or lower. Of the fastest orders
    # that fit the one with the fewest changes from block to block, then of the lowest
    # peak.
    segments = solution.segments
    if not segments:
        return solution
    for start, end in _equal_blocks(problem.chain):
        segments = _ordered(problem, segments, start, end)
    if segments == solution.segments:
        return solution
    explanation = solution.explanation.replace(
        describe(problem.chain, solution.segments or ()),
        describe(problem.chain, segments),
        1,
    )
    return replace(solution, segments=segments, explanation=explanation)


def _equal_blocks(chain: ChainProfile) -> Iterator[tuple[int, int]]:
    """Yield start and end of runs of blocks that take the same time in every option."""
    start = 0
    for _, run in groupby(chain.blocks, _times):
        end = start + len(list(run))
        joined = all(block.joins_next for block in chain.blocks[start : end - 1])
        if end - start >= MIN_EQUAL_BLOCKS and joined:
            yield start, end
        start = end


def _times(block: BlockProfile) -> tuple[object, ...]:
    options = (
        (option.mode, option.saved_ops, option.input_on_host, option.extra_ns)
        for option in block.options
    )
    return block.forward_ns, block.backward_ns, *options


def _ordered(
    problem: Problem, segments: tuple[Segment, ...], start: int, end: int
) -> tuple[Segment, ...]:
    """Return the segments with those of some equal blocks in order."""
    chain = problem.chain
    names = [block.name for block in chain.blocks[start:end]]
    inside = [each for each in segments if not set(names).isdisjoint(each.blocks)]
    if any(not set(each.blocks) <= set(names) for each in inside):
        return segments  # a segment spans other blocks, too
    number = {block.name: place for place, block in enumerate(chain.blocks)}
    others = [each for each in segments if each not in inside]
    best = segments
    rank = (
        chain_time_ns(chain, segments),
        _changes(names, inside),
        chain_peak_bytes(chain, segments),
    )
    for groups in _orders(_groups(inside, len(names))):
        changes = sum(len(set(lengths)) for _, lengths in groups) - 1
        placed = (*others, *_placed(groups, names))
        tried = tuple(sorted(placed, key=lambda each: number[each.blocks[0]]))
        found = (chain_time_ns(chain, tried), changes, chain_peak_bytes(chain, tried))
        if found < rank and found[-1] <= problem.limit_bytes:
            best, rank = tried, found
    return best


def _changes(names: Sequence[str], segments: Sequence[Segment]) -> int:
    """Return how often treatment or segment length changes from block to block."""
    of = {
        name: (Treatment.of(each), len(each.blocks))
        for each in segments
        for name in each.blocks
    }
    rows = [of.get(name) for name in names]
    return sum(one != other for one, other in pairwise(rows))


def _groups(segments: Sequence[Segment], blocks: int) -> list[Group]:
    """Return the segments by treatment, and the kept blocks last."""
    found: dict[Treatment, list[int]] = {}
    for each in segments:
        found.setdefault(Treatment.of(each), []).append(len(each.blocks))
    kept = blocks - sum(map(sum, found.values()))
    groups: list[Group] = [
        (of, tuple(lengths)) for of, lengths in sorted(found.items())
    ]
    return [*groups, (None, (1,) * kept)] if kept else groups


def _orders(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield orders of the groups, with their own segment lengths or a single one."""
    longest = max(max(lengths) for _, lengths in groups)
    cut = [[(of, tuple(sorted(lengths))) for of, lengths in groups]]
    cut += [
        [(of, _cut(of, lengths, length)) for of, lengths in groups]
        for length in range(1, longest + 1)
    ]
    for row in cut:
        # Kept blocks at the end leave before others are recomputed.
        yield row
        yield [*row[1:], *row[:1]]
        yield row[::-1]


def _cut(of: Treatment | None, lengths: Sequence[int], length: int) -> tuple[int, ...]:
    """Return as many blocks in segments of one length, and a shorter one first."""
    if of is None or of.nested or max(lengths) == 1:
        return tuple(lengths)
    whole, rest = divmod(sum(lengths), length)
    return (*((rest,) if rest else ()), *(length,) * whole)


def _placed(groups: Sequence[Group], names: Sequence[str]) -> Iterator[Segment]:
    """Yield the segments of groups, one after the other."""
    start = 0
    for of, lengths in groups:
        for length in lengths:
            if of is not None:
                yield of.segment(tuple(names[start : start + length]))
            start += length
