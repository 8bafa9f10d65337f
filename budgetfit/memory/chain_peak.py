"""The chain formula: how many bytes are alive at each point of a training step.

Memory-model rule C with the corrections of solver-facts 4.2. It is for the search; the
number that a user sees comes from ``memory.replay``.

A plan cuts the chain into steps. A step is one block with one of its options, or a
segment of several blocks: that saves only the first block's input, and runs forward
again in the backward pass, keeping everything then. Checkpointing is non-reentrant:
the gradient that comes into a segment is alive while the segment is recomputed and its
last block runs backward, and is freed there.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.core.errors import InputError
from budgetfit.core.recipe import Segment


class ChainPoint(NamedTuple):
    """One moment of a training step: what runs, and the bytes alive then."""

    label: str
    bytes: int


class _Step(NamedTuple):
    """Neighbouring blocks from number ``start`` on, each with its option.

    In a segment of several blocks that is each block's ``recompute`` option.
    """

    start: int
    blocks: tuple[BlockProfile, ...]
    options: tuple[BlockOption, ...]

    @property
    def saved_bytes(self) -> int:
        """S: what it leaves between its forward and its backward (rule C2)."""
        return self.options[0].saved_bytes

    @property
    def held_bytes(self) -> list[int]:
        """S of each block when the backward pass reaches the step's last block.

        A segment's input is counted once, with its first block. If that block saves
        less than the input, it cannot be holding it; then the checkpoint does.
        """
        if len(self.blocks) == 1:
            return [self.saved_bytes]
        first, *others = (block.keep.saved_bytes for block in self.blocks)
        holds_input = first >= self.saved_bytes
        return [first if holds_input else first + self.saved_bytes, *others]

    @property
    def backward_bytes(self) -> list[int]:
        """Most bytes alive above ``held_bytes`` in each block's backward.

        Inside a segment a block runs as if kept, or with less: recomputed tensors can
        be freed a moment earlier than kept ones. Recomputed alone, it was measured.
        """
        if len(self.blocks) == 1:
            return [self.options[0].backward_bytes]
        rows = zip(self.blocks, self.options, self.held_bytes, strict=True)
        return [
            min(
                block.keep.backward_bytes,
                alone.saved_bytes + alone.backward_bytes - held,
            )
            for block, alone, held in rows
        ]


def chain_points(
    chain: ChainProfile, segments: Sequence[Segment]
) -> tuple[ChainPoint, ...]:
    """Return the bytes alive at every point of a training step, in execution order.

    Args:
        chain: What each block costs, in bytes, at one batch size.
        segments: What is not simply kept; in any order.

    Raises:
        InputError: A segment names a block that the chain does not have, blocks that
            are not neighbours or do not hand their output straight on, a block without
            the segment's option, or one that another segment has too.
    """
    steps = _steps(chain, segments)
    forward, live = _forward(chain.static_bytes, steps)
    backward, live = _backward(chain, steps, live)
    optimizer = ChainPoint("optimizer step", live + chain.optimizer_bytes)
    return (*forward, *backward, optimizer)


def chain_peak_bytes(chain: ChainProfile, segments: Sequence[Segment]) -> int:
    """Return the most bytes alive at any point of one training step.

    Raises:
        InputError: As ``chain_points``.
    """
    return max(point.bytes for point in chain_points(chain, segments))


def chain_time_ns(chain: ChainProfile, segments: Sequence[Segment]) -> int:
    """Return the time of one forward and one backward pass, in nanoseconds.

    Recomputation is part of it. The optimizer step is not: with gradient accumulation
    several micro-batches share one.

    Raises:
        InputError: As ``chain_points``.
    """
    plain_ns = sum(block.forward_ns + block.backward_ns for block in chain.blocks)
    steps = _steps(chain, segments)
    return plain_ns + sum(option.extra_ns for step in steps for option in step.options)


def _forward(live: int, steps: Sequence[_Step]) -> tuple[list[ChainPoint], int]:
    """Return the points of the forward pass, and the bytes alive after it."""
    points = []
    # Autocast's copies of weights stay until the whole forward ends, whether or not a
    # block of that step saved them (cuda-memory M50).
    cached = 0
    for step in steps:
        input_bytes = 0  # the first block's f holds its own input
        for block, option in zip(step.blocks, step.options, strict=True):
            used = cached + input_bytes + option.forward_bytes
            points.append(ChainPoint(f"forward {block.name}", live + used))
            cached += option.cached_bytes
            input_bytes = step.saved_bytes
        live += step.saved_bytes
    return points, live


def _backward(
    chain: ChainProfile, steps: Sequence[_Step], live: int
) -> tuple[list[ChainPoint], int]:
    """Return the points of the backward pass, and the bytes alive after it."""
    points: list[ChainPoint] = []
    incoming = 0  # the chain's last block makes the loss: no gradient tensor comes in
    for step in reversed(steps):
        live -= step.saved_bytes  # from here on it is counted block by block
        if len(step.blocks) > 1:
            points += _recomputation(step, live + incoming)
        live += sum(step.held_bytes)
        rows = zip(step.blocks, step.backward_bytes, step.held_bytes, strict=True)
        for back, (block, used, held) in enumerate(reversed(list(rows)), 1):
            label = f"backward {block.name}"
            points.append(ChainPoint(label, live + incoming + used))
            live += block.gradient_bytes - held
            incoming = chain.block_input_bytes(step.start + len(step.blocks) - back)
    return points, live


def _recomputation(step: _Step, live: int) -> Iterator[ChainPoint]:
    """Yield the points at which a segment of several blocks runs forward again.

    Checkpointing enters autocast anew for it, so that copies of weights which nothing
    saves stay until the recomputation ends; those which are saved are part of S.
    """
    for block, held in zip(step.blocks, step.held_bytes, strict=True):
        label = f"recompute {block.name}"
        yield ChainPoint(label, live + block.keep.forward_bytes)
        live += held + block.keep.cached_bytes


def _steps(chain: ChainProfile, segments: Sequence[Segment]) -> list[_Step]:
    """Cut the chain into steps, in order of execution."""
    index = {block.name: number for number, block in enumerate(chain.blocks)}
    segment_at: dict[int, Segment] = {}
    wrapped: set[str] = set()
    for segment in segments:
        _check_segment(chain, index, segment)
        for name in segment.blocks:
            if name in wrapped:
                raise InputError(
                    f"Block {name!r} is in more than one segment. Name each block once."
                )
            wrapped.add(name)
        segment_at[index[segment.blocks[0]]] = segment
    steps = []
    start = 0
    while start < len(chain.blocks):
        segment_here = segment_at.get(start)
        length = len(segment_here.blocks) if segment_here else 1
        mode = segment_here.mode if segment_here else "keep"
        blocks = chain.blocks[start : start + length]
        options = tuple(o for block in blocks if (o := block.option(mode)) is not None)
        steps.append(_Step(start, blocks, options))
        start += length
    return steps


def _check_segment(
    chain: ChainProfile, index: dict[str, int], segment: Segment
) -> None:
    """Refuse a segment that this chain cannot run."""
    for name in segment.blocks:
        if name not in index:
            known = ", ".join(block.name for block in chain.blocks[:3])
            raise InputError(
                f"The chain has no block {name!r}. Its blocks are {known}, ..."
            )
        if chain.blocks[index[name]].option(segment.mode) is None:
            raise InputError(
                f"Block {name!r} cannot be wrapped with mode {segment.mode!r}. "
                "Leave it out of the segments."
            )
    if len(segment.blocks) > 1 and segment.mode != "recompute":
        raise InputError(
            f"A {segment.mode!r} segment is one block, for example "
            f'Segment(("{segment.blocks[0]}",), mode="{segment.mode}").'
        )
    for name, following in zip(segment.blocks, segment.blocks[1:], strict=False):
        if index[following] != index[name] + 1:
            raise InputError(
                f"Blocks {name!r} and {following!r} of one segment are not neighbours. "
                "Put them into two segments."
            )
        if not chain.blocks[index[name]].joins_next:
            raise InputError(
                f"Block {name!r} does not hand its output straight to {following!r}, "
                "so one segment cannot hold both. Put them into two segments."
            )
