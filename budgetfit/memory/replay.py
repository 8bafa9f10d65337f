"""THE JUDGE: plays a StepTrace at a batch size on a card and says what memory it takes.

Every number a user sees comes from here (architecture rule 1). Sizes are scaled to the
batch, kernels' scratch memory is asked of the card's rules, and each allocation and
free goes through the caching allocator in the order in which training would make it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.core.step_trace import CATEGORIES, StepTrace
from budgetfit.memory.caching_allocator import Block, CachingAllocator, OutOfMemory
from budgetfit.memory.kernel_scratch import KernelCard, scratch_bytes
from budgetfit.memory.step_schedule import Part, Stretch, schedule, with_micro_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from budgetfit.core.gpus import Gpu

LARGEST_LAYERS = 12  # shown at the peak
ENDLESS_BYTES = 1 << 60  # more than any device has, or any plan asks for


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
    values = np.zeros(len(trace.scratch), np.int64)
    for number, row in enumerate(trace.scratch):
        arguments = tuple(argument.at(batch_size) for argument in row.arguments)
        key = (row.rule, arguments)
        if key not in known:
            known[key] = scratch_bytes(card, *key)
        values[number] = known[key][row.part]
    ruled = trace.scratch_index >= 0
    sizes[ruled] = values[trace.scratch_index[ruled]]
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


@dataclass(slots=True)
class _Player:
    """The allocator and what it handed out, while a trace plays."""

    allocator: CachingAllocator
    sizes: dict[int, list[int]]  # of every storage, by samples per micro-batch
    samples: int
    events: list[int]
    blocks: dict[int, Block | None] = field(default_factory=dict)
    failed_bytes: int | None = None

    def play(self, part: Part) -> bool:
        """Play a part of the schedule; False when the device is full."""
        self.samples = part.samples
        return self.play_events(self.events[part.stretch.start : part.stretch.end])

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
    micro_steps: int = 1,
    what_is_alive: bool = True,
) -> MemoryTimeline:
    """Play the trace through the caching allocator and return what it took.

    The last traced step is played twice, so that a steady step follows the first ones.
    Of more micro-steps than were traced up to two are played: reserved memory settles.
    After it come steps of ``then_batch_sizes``, such as the smaller last batch of an
    epoch and the full ones after it: other sizes meet the blocks that are cached.

    Args:
        trace: The steps to play.
        batch_size: Samples per micro-batch.
        gpu: The card; its rules size the kernels' scratch memory.
        limit_bytes: Where the device is full; None for the whole card.
        expandable_segments: The allocator setting of that name.
        then_batch_sizes: Samples per micro-batch of further steps.
        micro_steps: Micro-batches in each step.
        what_is_alive: Also say what is alive at the peak, which plays it once more.

    Raises:
        ValueError: If the trace does not hold for one of the batch sizes, or its last
            step cannot be repeated at another.
    """
    card = kernel_card(gpu)
    sizes = {
        samples: storage_bytes(trace, samples, card).tolist()
        for samples in (batch_size, *then_batch_sizes)
    }
    total = gpu.total_bytes if limit_bytes is None else limit_bytes
    traced, events = with_micro_steps(trace, micro_steps)
    played = schedule(trace, traced, batch_size, then_batch_sizes)

    def player() -> _Player:
        allocator = CachingAllocator(total, expandable_segments=expandable_segments)
        return _Player(allocator, sizes, batch_size, events)

    actor = player()
    points: list[TimelinePoint] = []
    peak, peak_index = -1, 0
    for part in played:
        actor.allocator.reset_peaks()
        going = actor.play(part)
        allocated = actor.allocator.peak_allocated_bytes
        points.append(_point(trace, part.stretch, actor.allocator))
        if allocated > peak:
            peak, peak_index = allocated, len(points) - 1
        if not going:
            break
    categories, layers = (
        _at_peak(trace, played[: peak_index + 1], player(), peak)
        if what_is_alive
        else ({}, ())
    )
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
    trace: StepTrace, played: list[Part], actor: _Player, peak_bytes: int
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
