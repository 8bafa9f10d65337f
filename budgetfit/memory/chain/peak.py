"""Peak memory and time of a recipe on a chain profile: live bytes at each point.

For the search only; the figures that a user sees come from ``memory.replay``. While a
block runs its forward, alive are: static bytes + what earlier blocks saved and cached +
its ``forward_bytes``. In its backward: static bytes + what it and earlier blocks saved
+ the incoming gradient + the weight gradients of later blocks + its ``backward_bytes``.

A plan cuts the chain into steps: one block with one of its options, or a checkpointed
segment of several blocks. A segment saves only the first block's input, and runs
forward again in the backward pass. It keeps everything then or, if nested, each block's
input, so that each block runs forward a third time. An offloaded input is copied back
first. Checkpointing is non-reentrant: the gradient that enters a segment stays alive
while the segment is recomputed and its last block runs backward, and is freed there.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError


class ChainPoint(NamedTuple):
    """A point of a training step: what runs, and the bytes alive then."""

    label: str
    bytes: int


def extra_in_segment_ns(
    block: BlockProfile, again: BlockOption, *, nested: bool
) -> int:
    """Return the extra time of a block inside a segment, against recomputed alone."""
    return block.forward_ns if nested else max(0, block.forward_ns - again.extra_ns)


class _Step(NamedTuple):
    """Consecutive blocks from index ``start`` on, each with its option.

    In a segment of several blocks that is each block's ``recompute`` option, for the
    first one with its input on the host if the segment's is. ``again`` are the options
    of the recomputation, with the input back on the device.
    """

    start: int
    blocks: tuple[BlockProfile, ...]
    options: tuple[BlockOption, ...]
    again: tuple[BlockOption, ...]
    nested: bool

    @property
    def saved_bytes(self) -> int:
        """Bytes that live from the end of its forward to its backward."""
        return self.options[0].saved_bytes

    @property
    def extra_ns(self) -> int:
        """Time on top of the plain forward and backward."""
        # A recomputation stops after the last tensor that is needed (early stop). In a
        # segment that is in its last block: the others run in full. A nested segment
        # runs them once more, for the last one's input.
        extra_ns = sum(option.extra_ns for option in self.options)
        for block, option in zip(self.blocks[:-1], self.again, strict=False):
            extra_ns += extra_in_segment_ns(block, option, nested=self.nested)
        return extra_ns

    @property
    def held_bytes(self) -> list[int]:
        """Saved bytes of each block when the backward reaches the step's last block."""
        # A segment's input is counted once, with its first block. If that block saves
        # less than the input, the checkpoint holds it in addition.
        if len(self.blocks) == 1:
            return [self.saved_bytes]
        if self.nested:
            return [option.saved_bytes for option in self.again]
        first, *others = (block.keep.saved_bytes for block in self.blocks)
        input_bytes = self.again[0].saved_bytes
        return [first if first >= input_bytes else first + input_bytes, *others]

    @property
    def backward_bytes(self) -> list[int]:
        """Most bytes alive above ``held_bytes`` in each block's backward."""
        # Measured for a block that is recomputed alone or once more in a nested
        # segment. In any other segment a block runs as if kept, or with less:
        # recomputed tensors can be freed a moment earlier than kept ones.
        if len(self.blocks) == 1:
            return [self.options[0].backward_bytes]
        if self.nested:
            return [option.backward_bytes for option in self.again]
        rows = zip(self.blocks, self.again, self.held_bytes, strict=True)
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

    ``segments``: the blocks that are not kept, in any order.

    Raises:
        InputError: A segment has an unknown block, blocks that are not consecutive or
            do not pass their output on directly, a block without the segment's option,
            or a block of another segment.
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
    return plain_ns + sum(step.extra_ns for step in _steps(chain, segments))


def optimizer_step_bytes(chain: ChainProfile) -> int:
    """Return the peak of the optimizer step, the same for every plan."""
    gradients = sum(block.gradient_bytes for block in chain.blocks)
    return chain.static_bytes + gradients + chain.optimizer_bytes


def chain_host_bytes(chain: ChainProfile, segments: Sequence[Segment]) -> int:
    """Return the pinned host memory of a training step's offloaded tensors.

    Raises:
        InputError: As ``chain_points``.
    """
    steps = _steps(chain, segments)
    return sum(option.host_bytes for step in steps for option in step.options)


def _forward(live: int, steps: Sequence[_Step]) -> tuple[list[ChainPoint], int]:
    """Return the points of the forward pass, and the bytes alive after it."""
    points = []
    # Autocast's weight cache lives until the whole forward ends, whether or not a block
    # of that step saved the copies.
    cached = 0
    for step in steps:
        input_bytes = 0  # the first block's forward_bytes include its input
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
        live -= step.saved_bytes  # counted block by block from here on
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
    """Yield the points at which a segment of several blocks runs forward again."""
    # Checkpointing enters autocast anew, so that weight copies that nothing saves live
    # until the recomputation ends; the others count as saved. A nested one ends when
    # the last block has its input.
    ran = step.again if step.nested else [block.keep for block in step.blocks]
    rows = list(zip(step.blocks, ran, step.held_bytes, strict=True))
    for block, option, held in rows[:-1] if step.nested else rows:
        yield ChainPoint(f"recompute {block.name}", live + option.forward_bytes)
        live += held + option.cached_bytes


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
        step = _step(chain, start, segment_at.get(start))
        steps.append(step)
        start += len(step.blocks)
    return steps


def _step(chain: ChainProfile, start: int, segment: Segment | None) -> _Step:
    """Return the step that starts at a block, which is kept without a segment."""
    if segment is None:
        kept = chain.blocks[start]
        return _Step(start, (kept,), (kept.keep,), (), nested=False)
    blocks = chain.blocks[start : start + len(segment.blocks)]
    options = (block.option_in(segment) for block in blocks)
    again = (block.option("recompute") for block in blocks)
    return _Step(
        start,
        blocks,
        tuple(option for option in options if option is not None),
        tuple(option for option in again if option is not None),
        segment.nested,
    )


def _check_segment(
    chain: ChainProfile, index: dict[str, int], segment: Segment
) -> None:
    """Raise InputError for a segment that this chain cannot run."""
    for name in segment.blocks:
        if name not in index:
            known = ", ".join(block.name for block in chain.blocks[:3])
            raise InputError(
                f"The chain has no block {name!r}. Its blocks are {known}, ..."
            )
        _check_option(chain.blocks[index[name]], segment)
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


def _check_option(block: BlockProfile, segment: Segment) -> None:
    """Raise InputError for a block without the segment's option."""
    plain = block.option("recompute") is not None
    if block.option_in(segment) is not None and (plain or len(segment.blocks) == 1):
        return
    modes = {option.mode for option in block.options}
    if segment.saved_ops and segment.mode in modes:
        known = "; ".join(", ".join(o.saved_ops) for o in block.options if o.saved_ops)
        raise InputError(
            f"Block {block.name!r} cannot save just {', '.join(segment.saved_ops)}. "
            f"Sets of ops that it can save: {known}."
        )
    if segment.input_on_host and plain:
        raise InputError(
            f"Block {block.name!r} cannot have its input on the host. Leave out "
            "input_on_host."
        )
    raise InputError(
        f"Block {block.name!r} cannot be wrapped with mode {segment.mode!r}. "
        "Leave it out of the segments."
    )
