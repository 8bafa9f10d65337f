"""The steps that a plan can be cut into, each with its bytes as two numbers per pass.

The same rule C as ``memory.chain_peak`` (the tests hold them together), written so that
what a step needs above the bytes before it is one number for the forward and one for
the backward pass. The gradients that later blocks leave behind are a known sum, because
every plan computes all of them.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import le
from typing import Any, Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.block_profile import BlockOption, ChainProfile
from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import whole_forward_ns
from budgetfit.solvers.problem import (
    Problem,
    Same,
    longer_kinds,
    segment,
    single_segment,
)
from budgetfit.solvers.segment_costs import backward_needs, forward_needs

Numbers = NDArray[np.int64]
_BACKWARD: Final = 3  # of the numbers of a step
_WRAPPED: Final = 5


class ChainStep(NamedTuple):
    """Blocks up to ``stop - 1``: one with one of its options, or a longer segment.

    Attributes:
        stop: Number of the block after it.
        saved_bytes: What it adds to the bytes alive in front of later steps.
        cached_bytes: What it adds to that in the forward pass only.
        forward_bytes: Most bytes alive above those in front of it, in its forward.
        backward_bytes: The same for its backward, later gradients included.
        extra_ns: Time above the plain forward and backward.
        wrapped: How many blocks it wraps; 0 for a kept block.
        option: Of the first block: the option that it has.
        nested: Whether the segment is recomputed in two levels.
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
        """Return the same step so many blocks further, with more bytes coming in."""
        # ``_replace`` takes four times as long, and there are thousands.
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
        """Return the segment that the step stands for; None for a kept block."""
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


def chain_steps(problem: Problem) -> list[list[ChainStep]]:
    """Return, for each block, the steps that start there, in index order.

    Wrapping it, in the order of ``segments_from``, then keeping it.
    """
    incoming = incoming_bytes(problem.chain)
    return [
        _row(problem, start, incoming[start:])
        for start in range(len(problem.chain.blocks))
    ]


def _row(problem: Problem, start: int, incoming: list[int]) -> list[ChainStep]:
    """Return the steps that start at a block; ``incoming`` is from there on."""
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
    """The steps that are worth it, and their numbers: a row of six for each step.

    A row like an earlier one is made when it is asked for: bounds need numbers only.
    """

    def __init__(
        self, rows: "list[list[ChainStep] | _Like]", numbers: list[Numbers]
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
        if isinstance(row := self._rows[start], _Like):
            row = [step.moved(row.further, row.incoming_bytes) for step in row.steps]
            self._rows[start] = row
        return row

    def one(self, start: int, index: int) -> ChainStep:
        """Return one step of a row, which need not be made for it."""
        if isinstance(row := self._rows[start], _Like):
            return row.steps[index].moved(row.further, row.incoming_bytes)
        return row[index]

    def stops(self, start: int) -> Numbers:
        """Return where each step of a row ends."""
        stops: Numbers = start + np.maximum(self.numbers[start][:, _WRAPPED], 1)
        return stops


class _Like(NamedTuple):
    """A row like an earlier one, so many blocks further, with more bytes coming in."""

    steps: list[ChainStep]
    further: int
    incoming_bytes: int


def steps_of(problem: Problem) -> Steps:
    """Return the worthwhile steps; those of the last chains are remembered."""
    return _remembered(Same(problem.chain), problem.max_segment, problem.nested)


@lru_cache(maxsize=32)
def _remembered(same: Same, max_segment: int | None, nested: bool) -> Steps:
    """Return the worthwhile steps, made once for neighbourhoods that are equal.

    Those differ by their place, and by the bytes that come into all their backwards.
    """
    chain = same.chain
    problem = Problem(
        chain=chain, budget_bytes=0, max_segment=max_segment, nested=nested
    )
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
    rows: list[list[ChainStep] | _Like] = []
    numbers: list[Numbers] = []
    for start in range(len(chain.blocks)):
        stop = None if max_segment is None else start + max_segment + 1
        arriving = incoming[start:stop]
        key = (*kind[start:stop], *(each - arriving[0] for each in arriving))
        if key not in known:
            (row,) = worthwhile([_row(problem, start, incoming[start:])])
            known[key] = start, row, _as_array(row)
        before, row, array = known[key]
        if before == start:
            rows.append(row)
        else:
            shift = arriving[0] - incoming[before]
            array = array.copy()
            array[:, _BACKWARD] += shift
            rows.append(_Like(row, start - before, shift))
        numbers.append(array)
    return Steps(rows, numbers)


def _as_array(row: list[ChainStep]) -> Numbers:
    return np.array([_numbers(step) for step in row], np.int64)


def worthwhile(steps: list[list[ChainStep]]) -> list[list[ChainStep]]:
    """Return the steps without those that another one replaces at no loss.

    Of two that run the same blocks that is the one which needs no less of anything; if
    they are equal in all, the later one.
    """
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
    """Return what each block's backward finds alive besides everything saved.

    The gradient of its output (none comes into the last block) and the weight gradients
    of all later blocks.
    """
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
    again = [o for block in blocks if (o := block.option("recompute")) is not None]
    kinds = longer_kinds(problem, start) if len(again) > 1 else []
    # By length: without the first block's part, and without the last block's.
    others_ns = list(accumulate((o.extra_ns for o in again[1:]), initial=0))
    whole_ns = {
        nested: list(
            accumulate(
                (
                    whole_forward_ns(block, option, nested=nested)
                    for block, option in zip(blocks, again, strict=False)
                ),
                initial=0,
            )
        )
        for nested, _ in kinds
    }
    rows = []
    for nested, on_host in kinds:
        first = blocks[0].option("recompute", input_on_host=on_host) or again[0]
        forward = forward_needs([first, *again[1:]])
        backward = backward_needs(blocks, again, incoming, nested=nested)
        rows.append((nested, first, list(zip(forward, backward, strict=True))))
    for length in range(2, len(again) + 1):
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
