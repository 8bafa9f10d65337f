"""THE JUDGE: plays a StepTrace at a batch size on a card and says what memory it takes.

Every number a user sees comes from here (architecture rule 1). Sizes are scaled to the
batch, kernels' scratch memory is asked of the card's rules, and each allocation and
free goes through the caching allocator in the order in which training would make it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.core.step_trace import CATEGORIES, Phase, StepTrace
from budgetfit.memory.caching_allocator import Block, CachingAllocator, OutOfMemory
from budgetfit.memory.kernel_scratch import KernelCard, scratch_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from budgetfit.core.gpus import Gpu
    from budgetfit.core.step_trace import BlockPass

LARGEST_LAYERS = 12  # shown at the peak
ENDLESS_BYTES = 1 << 46  # more than any device has
STEADY_REPEATS = 1  # the last traced step is played once more: memory has settled then


def kernel_card(gpu: Gpu) -> KernelCard:
    """Return what kernel rules need to know of a card."""
    return KernelCard(gpu.compute_capability, gpu.sm_count, gpu.threads_per_sm)


def storage_bytes(
    trace: StepTrace, batch_size: int, card: KernelCard
) -> NDArray[np.int64]:
    """Return the requested bytes of every storage, unrounded, at ``batch_size``.

    Raises:
        ValueError: If the trace holds for other batch sizes only.
    """
    if len(trace.batch_sizes) == 1 and batch_size != trace.batch_sizes[0]:
        raise ValueError(
            f"this trace holds for batch size {trace.batch_sizes[0]} only, "
            f"not for {batch_size}"
        )
    sizes = trace.fixed_bytes + trace.bytes_per_sample * batch_size
    known: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for storage in np.flatnonzero(trace.scratch_index >= 0).tolist():
        row = trace.scratch[trace.scratch_index[storage]]
        arguments = tuple(argument.at(batch_size) for argument in row.arguments)
        key = (row.rule, arguments)
        if key not in known:
            known[key] = scratch_bytes(card, *key)
        sizes[storage] = known[key][row.part]
    return sizes


def block_bytes(
    trace: StepTrace,
    batch_size: int,
    card: KernelCard,
    *,
    expandable_segments: bool = False,
) -> NDArray[np.int64]:
    """Return what every storage really takes: the block that the allocator hands out.

    That is the request rounded up to 512 bytes, and a tail too small to be split off
    (B1). Tails depend on all that was allocated before, so the trace is played, on a
    device without a limit.
    """
    sizes = storage_bytes(trace, batch_size, card).tolist()
    blocks = np.zeros(len(sizes), np.int64)
    allocator = CachingAllocator(ENDLESS_BYTES, expandable_segments=expandable_segments)
    alive: dict[int, Block | None] = {}
    for event in trace.events.tolist():
        if event > 0:
            block = alive[event] = allocator.malloc(sizes[event - 1])
            blocks[event - 1] = 0 if block is None else block.size_bytes
        else:
            allocator.free(alive.pop(-event, None))
    return blocks


class Stretch(NamedTuple):
    """Events ``start`` to ``end``: all in one phase and in one block (or none)."""

    step: int
    micro_step: int
    phase: str
    block: int
    start: int
    end: int


def stretches(trace: StepTrace) -> Iterator[Stretch]:
    """Cut the trace at every edge of a phase and of a block's pass."""
    inside: dict[tuple[str, int, int], list[BlockPass]] = defaultdict(list)
    for row in trace.passes:
        inside[(row.direction, row.step, row.micro_step)].append(row)
    for phase in trace.phases:
        position = phase.start
        for row in inside[(phase.name, phase.step, phase.micro_step)]:
            if row.start > position:
                yield _stretch(phase, -1, position, row.start)
            yield _stretch(phase, row.block, row.start, row.end)
            position = row.end
        if phase.end > position or phase.start == phase.end:
            yield _stretch(phase, -1, position, phase.end)


def _stretch(phase: Phase, block: int, start: int, end: int) -> Stretch:
    return Stretch(phase.step, phase.micro_step, phase.name, block, start, end)


class _Part(NamedTuple):
    """A stretch of the trace, played with so many samples per micro-batch."""

    stretch: Stretch
    samples: int


@dataclass(slots=True)
class _Player:
    """The allocator and what it handed out, while a trace plays."""

    trace: StepTrace
    allocator: CachingAllocator
    sizes: dict[int, list[int]]  # of every storage, by samples per micro-batch
    samples: int
    events: list[int]
    blocks: dict[int, Block | None] = field(default_factory=dict)
    failed_bytes: int | None = None

    def play(self, part: _Part) -> bool:
        """Play a part of the schedule; False when the device is full."""
        going = part.samples == self.samples or self._change_batch(part.samples)
        stretch = part.stretch
        return going and self.play_events(self.events[stretch.start : stretch.end])

    def _change_batch(self, samples: int) -> bool:
        """Drop the batch and take one of another size, in this order.

        That is what a loop does that moves each batch of its loader to the device.
        """
        category = CATEGORIES.index("batch")
        batch = [x for x in self.blocks if self.trace.category[x - 1] == category]
        self.samples = samples
        return self.play_events([-x for x in batch]) and self.play_events(batch)

    def play_events(self, events: list[int]) -> bool:
        """Play some events; False when the device is full."""
        malloc, free = self.allocator.malloc, self.allocator.free
        blocks, sizes = self.blocks, self.sizes[self.samples]
        try:
            for event in events:
                if event > 0:
                    size = sizes[event - 1]
                    if size:
                        blocks[event] = malloc(size)
                else:
                    free(blocks.pop(-event, None))
        except OutOfMemory as error:
            self.failed_bytes = error.requested_bytes
            return False
        return True


def replay(  # noqa: PLR0913 - a trace, a card and how to play it
    trace: StepTrace,
    batch_size: int,
    gpu: Gpu,
    *,
    limit_bytes: int | None = None,
    expandable_segments: bool = False,
    then_batch_sizes: tuple[int, ...] = (),
) -> MemoryTimeline:
    """Play the trace through the caching allocator and return what it took.

    The last traced step is played twice, so that a steady step follows the first ones.
    After it come steps of ``then_batch_sizes``, such as the smaller last batch of an
    epoch and the full ones after it: other sizes meet the blocks that are cached.

    Args:
        trace: The steps to play.
        batch_size: Samples per micro-batch.
        gpu: The card; its rules size the kernels' scratch memory.
        limit_bytes: Where the device is full; None for the whole card.
        expandable_segments: The allocator setting of that name.
        then_batch_sizes: Samples per micro-batch of further steps.

    Raises:
        ValueError: If the trace does not hold for one of the batch sizes, or its last
            step cannot be repeated at another.
    """
    card = kernel_card(gpu)
    sizes = {
        samples: storage_bytes(trace, samples, card).tolist()
        for samples in (batch_size, *then_batch_sizes)
    }
    events = trace.events.tolist()
    total = gpu.total_bytes if limit_bytes is None else limit_bytes
    schedule = _schedule(trace, batch_size, then_batch_sizes)

    def player() -> _Player:
        allocator = CachingAllocator(total, expandable_segments=expandable_segments)
        return _Player(trace, allocator, sizes, batch_size, events)

    actor = player()
    points: list[TimelinePoint] = []
    peak, peak_index = -1, 0
    for part in schedule:
        actor.allocator.reset_peaks()
        going = actor.play(part)
        allocated = actor.allocator.peak_allocated_bytes
        points.append(_point(trace, part.stretch, actor.allocator))
        if allocated > peak:
            peak, peak_index = allocated, len(points) - 1
        if not going:
            break
    categories, layers = _at_peak(trace, schedule[: peak_index + 1], player(), peak)
    return MemoryTimeline(
        points=tuple(points),
        allocated_bytes=peak,
        reserved_bytes=max(point.reserved_bytes for point in points),
        at_peak_bytes=categories,
        at_peak_layers=layers,
        peak=peak_index,
        retries=actor.allocator.retries,
        failed_bytes=actor.failed_bytes,
    )


def _schedule(
    trace: StepTrace, batch_size: int, then_batch_sizes: tuple[int, ...]
) -> list[_Part]:
    """All stretches, the last step's once more where it leaves nothing behind."""
    traced = list(stretches(trace))
    last = max(stretch.step for stretch in traced)
    steady = [stretch for stretch in traced if stretch.step == last]
    played = [_Part(stretch, batch_size) for stretch in traced]
    repeats = (batch_size,) * STEADY_REPEATS + then_batch_sizes
    if last < 1 or not _closed(trace.events[steady[0].start : steady[-1].end]):
        if then_batch_sizes:
            raise ValueError("the last step of this trace cannot be repeated")
        return played
    for number, samples in enumerate(repeats, start=last + 1):
        played += [_Part(row._replace(step=number), samples) for row in steady]
    return played


def _closed(events: NDArray[np.int32]) -> bool:
    """Whether these events free what they allocate, and nothing else."""
    return bool(
        (np.sort(events[events > 0]) == np.sort(-events[events < 0])).all()
        if (events > 0).sum() == (events < 0).sum()
        else False
    )


def _point(
    trace: StepTrace, stretch: Stretch, allocator: CachingAllocator
) -> TimelinePoint:
    return TimelinePoint(
        step=stretch.step,
        micro_step=stretch.micro_step,
        phase=stretch.phase,
        block=trace.block_names[stretch.block] if stretch.block >= 0 else "",
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
    )


def _at_peak(
    trace: StepTrace, played: list[_Part], actor: _Player, peak_bytes: int
) -> tuple[dict[str, int], tuple[tuple[str, int], ...]]:
    """Play again up to the peak and add up what is alive there, tails included."""
    *before, last = played
    for part in before:
        actor.play(part)
    actor.allocator.reset_peaks()
    start, end = last.stretch.start, last.stretch.end
    actor.play(last._replace(stretch=last.stretch._replace(end=start)))
    for event in actor.events[start:end]:
        actor.play_events([event])
        if actor.allocator.allocated_bytes >= peak_bytes:
            break
    categories: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    layers: dict[str, int] = defaultdict(int)
    for event, block in actor.blocks.items():
        if block is None:
            continue
        size = block.size_bytes
        categories[CATEGORIES[trace.category[event - 1]]] += size
        layer = int(trace.layer[event - 1])
        layers[trace.layers[layer] if layer >= 0 else ""] += size
    largest = sorted(layers.items(), key=lambda item: (-item[1], item[0]))
    return categories, tuple(largest[:LARGEST_LAYERS])
