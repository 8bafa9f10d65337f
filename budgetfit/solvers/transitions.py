"""DP transitions: the steps of a plan, with their saved bytes and peaks.

The same formula as ``memory.chain.peak`` (tests compare them), written so that a step's
peak above the bytes saved before it is one number for the forward and one for the
backward pass. The gradients of later blocks are a known sum, because every plan
computes all of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from operator import le
from typing import Any, Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import extra_in_segment_ns
from budgetfit.solvers.problem import Problem, segment, segment_variants, single_segment

Numbers = NDArray[np.int64]
_BACKWARD: Final = 3  # column of a step's numbers
_WRAPPED: Final = 5


class ChainStep(NamedTuple):
    """A step over the blocks up to ``stop - 1``: one block's option, or a segment.

    Attributes:
        stop: Index of the block after it.
        saved_bytes: Bytes that it keeps for later steps.
        cached_bytes: Further bytes that it keeps in the forward pass only.
        forward_bytes: Peak of its forward above the bytes before it.
        backward_bytes: Peak of its backward, later gradients included.
        extra_ns: Time above the plain forward and backward.
        wrapped: Number of blocks that it wraps; 0 for a kept block.
        option: The first block's option.
        nested: Whether blocks inside the segment are checkpointed again.
    """

    stop: int
    saved_bytes: int
    cached_bytes: int
    forward_bytes: int
    backward_bytes: int
    extra_ns: int
    wrapped: int
    option: BlockOption
    nested: bool = False

    def moved(self, blocks: int, incoming_bytes: int) -> "ChainStep":
        """Return the step shifted by so many blocks, with more incoming bytes."""
        # ``_replace`` is four times slower, and there are thousands of steps.
        return ChainStep(
            self.stop + blocks,
            self.saved_bytes,
            self.cached_bytes,
            self.forward_bytes,
            self.backward_bytes + incoming_bytes,
            self.extra_ns,
            self.wrapped,
            self.option,
            self.nested,
        )

    def segment(self, chain: ChainProfile) -> Segment | None:
        """Return the segment of the step; None for a kept block."""
        if not self.wrapped:
            return None
        start = self.stop - self.wrapped
        if self.wrapped == 1:
            return single_segment(chain.blocks[start], self.option)
        return segment(
            chain,
            start,
            self.wrapped,
            nested=self.nested,
            input_on_host=self.option.input_on_host,
        )


def steps_from(problem: Problem, start: int, incoming: list[int]) -> list[ChainStep]:
    """Return the steps that start at a block; ``incoming`` is from there on.

    First the options of the single block, in their order; then ever longer segments,
    each plain, with its input on the host, nested, and both; last, keeping it.
    """
    block = problem.chain.blocks[start]
    return [
        *(
            _one_block(start, option, incoming[0], wrapped=1)
            for option in block.options
            if option.mode != "keep"
        ),
        *_longer(problem, start, incoming),
        _one_block(start, block.keep, incoming[0], wrapped=0),
    ]


class Steps(Sequence[list[ChainStep]]):
    """The steps of each block, and their numbers: an array of shape (steps, 6).

    Rows that repeat an earlier one are made on demand: bounds need numbers only.
    """

    def __init__(
        self, rows: "list[list[ChainStep] | _ShiftedRow]", numbers: list[Numbers]
    ) -> None:
        self._rows = rows
        self.numbers = numbers

    @classmethod
    def of(cls, rows: Sequence[list[ChainStep]]) -> "Steps":
        """Return these steps with their numbers."""
        if isinstance(rows, cls):
            return rows
        return cls(list(rows), [_as_array(row) for row in rows])

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, start: int) -> list[ChainStep]: ...
    @overload
    def __getitem__(self, start: slice) -> list[list[ChainStep]]: ...
    def __getitem__(self, start: int | slice) -> Any:
        if isinstance(start, slice):
            return [self[index] for index in range(*start.indices(len(self)))]
        if isinstance(row := self._rows[start], _ShiftedRow):
            row = [step.moved(row.shift, row.incoming_bytes) for step in row.steps]
            self._rows[start] = row
        return row

    def one(self, start: int, index: int) -> ChainStep:
        """Return one step of a row without making the row."""
        if isinstance(row := self._rows[start], _ShiftedRow):
            return row.steps[index].moved(row.shift, row.incoming_bytes)
        return row[index]

    def stops(self, start: int) -> Numbers:
        """Return where each step of a row ends."""
        stops: Numbers = start + np.maximum(self.numbers[start][:, _WRAPPED], 1)
        return stops


class _ShiftedRow(NamedTuple):
    """An earlier row, shifted by so many blocks, with more incoming bytes."""

    steps: list[ChainStep]
    shift: int
    incoming_bytes: int


def worthwhile_steps(problem: Problem) -> Steps:
    """Return the steps of a chain without dominated ones; cached for any limit."""
    return _worthwhile_steps(replace(problem, limit_bytes=0))


@lru_cache(maxsize=32)
def _worthwhile_steps(problem: Problem) -> Steps:
    """Return the steps without dominated ones, made once for equal neighbourhoods."""
    # Those differ only by their position and by the incoming bytes of their backwards.
    chain, max_segment = problem.chain, problem.max_segment
    incoming = incoming_bytes(chain)
    kinds: dict[tuple[object, ...], int] = {}
    kind = [
        kinds.setdefault(
            (block.options, block.gradient_bytes, block.forward_ns, block.joins_next),
            len(kinds),
        )
        for block in chain.blocks
    ]
    known: dict[tuple[object, ...], tuple[int, list[ChainStep], Numbers]] = {}
    rows: list[list[ChainStep] | _ShiftedRow] = []
    numbers: list[Numbers] = []
    for start in range(len(chain.blocks)):
        stop = None if max_segment is None else start + max_segment + 1
        arriving = incoming[start:stop]
        key = (*kind[start:stop], *(each - arriving[0] for each in arriving))
        if key not in known:
            steps = steps_from(problem, start, incoming[start:])
            (row,) = drop_dominated_steps([steps])
            known[key] = start, row, _as_array(row)
        before, row, array = known[key]
        if before == start:
            rows.append(row)
        else:
            shift = arriving[0] - incoming[before]
            array = array.copy()
            array[:, _BACKWARD] += shift
            rows.append(_ShiftedRow(row, start - before, shift))
        numbers.append(array)
    return Steps(rows, numbers)


def _as_array(row: list[ChainStep]) -> Numbers:
    return np.array([_numbers(step) for step in row], np.int64)


def drop_dominated_steps(steps: list[list[ChainStep]]) -> list[list[ChainStep]]:
    """Drop dominated steps: another over the same blocks is no worse in anything."""
    # Of equal ones the first stays.
    kept = []
    for row in steps:
        by_stop: dict[int, list[ChainStep]] = {}
        for step in sorted(row, key=_numbers):  # stable: equal ones stay in order
            rivals = by_stop.setdefault(step.stop, [])
            if not any(
                all(map(le, _numbers(rival), _numbers(step))) for rival in rivals
            ):
                rivals.append(step)
        found = {id(step) for rivals in by_stop.values() for step in rivals}
        kept.append([step for step in row if id(step) in found])
    return kept


def _numbers(step: ChainStep) -> tuple[int, ...]:
    return step[1:7]


def incoming_bytes(chain: ChainProfile) -> list[int]:
    """Return the live bytes at each block's backward besides saved tensors."""
    # The gradient of its output (none for the last block) and the weight gradients of
    # all later blocks.
    later = list(accumulate(block.gradient_bytes for block in reversed(chain.blocks)))
    outputs = [block.output_bytes for block in chain.blocks[:-1]]
    return [
        output + gradients
        for output, gradients in zip([*outputs, 0], [*later[-2::-1], 0], strict=True)
    ]


def _one_block(
    start: int, option: BlockOption, incoming: int, *, wrapped: int
) -> ChainStep:
    return ChainStep(
        stop=start + 1,
        saved_bytes=option.saved_bytes,
        cached_bytes=option.cached_bytes,
        forward_bytes=option.forward_bytes,
        backward_bytes=option.saved_bytes + incoming + option.backward_bytes,
        extra_ns=option.extra_ns,
        wrapped=wrapped,
        option=option,
    )


def _longer(problem: Problem, start: int, incoming: list[int]) -> Iterator[ChainStep]:
    """Yield the segments of several blocks from a block on, the shortest first."""
    blocks = problem.chain.blocks[start : start + problem.longest_segment(start)]
    options = [o for block in blocks if (o := block.option("recompute")) is not None]
    kinds = segment_variants(problem, start) if len(options) > 1 else []
    # Cumulative times by length: without the first block's, and without the last's.
    others_ns = list(accumulate((o.extra_ns for o in options[1:]), initial=0))
    whole_ns = {
        nested: list(
            accumulate(
                (
                    extra_in_segment_ns(block, option, nested=nested)
                    for block, option in zip(blocks, options, strict=False)
                ),
                initial=0,
            )
        )
        for nested, _ in kinds
    }
    rows = []
    for nested, on_host in kinds:
        first = blocks[0].option("recompute", input_on_host=on_host) or options[0]
        forward = _forward_needs([first, *options[1:]])
        backward = _backward_needs(blocks, options, incoming, nested=nested)
        rows.append((nested, first, list(zip(forward, backward, strict=True))))
    for length in range(2, len(options) + 1):
        for nested, first, needs in rows:
            (cached, forward_bytes), backward_bytes = needs[length - 1]
            yield ChainStep(
                stop=start + length,
                saved_bytes=first.saved_bytes,
                cached_bytes=cached,
                forward_bytes=forward_bytes,
                backward_bytes=backward_bytes,
                extra_ns=first.extra_ns
                + others_ns[length - 1]
                + whole_ns[nested][length - 1],
                wrapped=length,
                option=first,
                nested=nested,
            )


def _forward_needs(options: Sequence[BlockOption]) -> Iterator[tuple[int, int]]:
    """Yield cached bytes and forward peak of ever longer recomputed segments."""
    input_bytes = cached = most = 0  # the first block's f holds its own input
    for option in options:
        most = max(most, cached + input_bytes + option.forward_bytes)
        cached += option.cached_bytes
        input_bytes = options[0].saved_bytes
        yield cached, most


def _backward_needs(
    blocks: Sequence[BlockProfile],
    options: Sequence[BlockOption],
    incoming: Sequence[int],
    *,
    nested: bool,
) -> Iterator[int]:
    """Yield the peak of recomputation and backward of ever longer segments.

    Args:
        blocks: From the segment's first on.
        options: Each block's option to recompute it.
        incoming: Live bytes at each one's backward: ``incoming_bytes``.
        nested: Whether blocks inside are checkpointed again. The recomputation then
            leaves out the last block: its need comes after.
    """
    input_bytes = options[0].saved_bytes
    held = cached = recompute = backward = 0
    for block, option, arriving in zip(blocks, options, incoming, strict=False):
        ran = option if nested else block.keep
        forward = max(recompute, held + cached + ran.forward_bytes)
        alone = held + option.saved_bytes + option.backward_bytes
        # The segment's input is counted once, with the block that saves it too.
        holds_input = block is not blocks[0] or ran.saved_bytes >= input_bytes
        held += ran.saved_bytes + (0 if holds_input else input_bytes)
        used = alone if nested else min(held + ran.backward_bytes, alone)
        backward = max(backward, used + arriving)
        yield max(backward, (recompute if nested else forward) + arriving)
        recompute = forward
        cached += ran.cached_bytes
