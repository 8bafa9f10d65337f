"""THE JUDGE: plays a StepTrace at a batch size on a card and says what memory it takes.

Every number a user sees comes from here (architecture rule 1). Sizes are scaled to the
batch, kernels' scratch memory is asked of the card's rules, and each allocation and
free goes through the caching allocator in the order in which training would make it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.core.step_trace import CATEGORIES, StepTrace
from budgetfit.memory.caching_allocator import Played, QuickAllocator
from budgetfit.memory.kernel_rules.workspaces import KernelCard, scratch_bytes
from budgetfit.memory.loss_storages import LOGITS_AND_LOSS, LOSS, loss_storages
from budgetfit.memory.reference_allocator.allocator import (
    Block,
    CachingAllocator,
    OutOfMemory,
)
from budgetfit.memory.replay_schedule import Part, Stretch, schedule, with_micro_steps

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from numpy.typing import NDArray

    from budgetfit.gpus.table import Gpu

LARGEST_LAYERS = 12  # shown at the peak
ENDLESS_BYTES = 1 << 60  # more than any device has, or any plan asks for
# Timelines that are remembered: a batch size is asked for to see if it fits, then to be
# shown. A limit that is not reached changes nothing, so that it is no part of the key.
MOST_KNOWN = 16
_KNOWN: dict[tuple[Hashable, ...], MemoryTimeline] = {}


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
    blocks = np.zeros(trace.fixed_bytes.size, np.int64)
    kind = _SlowAllocator if expandable_segments else QuickAllocator
    given = kind(ENDLESS_BYTES).play(
        trace.events.tolist(), _rounded_bytes(trace, batch_size, card)
    )
    born = trace.events > 0
    blocks[trace.events[born] - 1] = np.array(given.given, np.int64)[born]
    return blocks


class _SlowAllocator:
    """The full allocator, played as the quick one is: with expandable segments."""

    def __init__(self, total_bytes: int) -> None:
        self._allocator = CachingAllocator(total_bytes, expandable_segments=True)
        self._blocks: dict[int, Block | None] = {}
        self.failed_event: int | None = None

    @property
    def retries(self) -> int:
        """How often the cache was emptied."""
        return self._allocator.retries

    def play(self, events: list[int], sizes: list[int]) -> Played:
        """Play events as ``QuickAllocator.play``."""
        allocator, blocks = self._allocator, self._blocks
        allocator.reset_peaks()
        given = []
        for event in events:
            if event > 0:
                try:
                    block = blocks[event] = allocator.malloc(sizes[event - 1])
                except OutOfMemory:
                    self.failed_event = event
                    break
                given.append(0 if block is None else block.size_bytes)
            else:
                block = blocks.pop(-event, None)
                given.append(0 if block is None else -block.size_bytes)
                allocator.free(block)
        return Played(
            given, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        )


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
        what_is_alive: Say what is alive at the peak also where memory ran out, or
            where the cache had to be emptied.

    Raises:
        ValueError: If the trace does not hold for one of the batch sizes, or its last
            step cannot be repeated at another.
    """
    card = kernel_card(gpu)
    total = gpu.total_bytes if limit_bytes is None else limit_bytes
    program = trace, batch_size, then_batch_sizes, micro_steps
    key = *program, card, expandable_segments
    known = _KNOWN.get(key)
    if known is not None and known.reserved_bytes <= total:
        return known
    parts, events = _program(*program)
    kind = _SlowAllocator if expandable_segments else QuickAllocator
    allocator = kind(total)
    played = list(_play(allocator, trace, card, parts, events))
    allocated = [each.peak_allocated_bytes for each in played]
    peak = allocated.index(max(allocated))
    whole = allocator.failed_event is None and allocator.retries == 0
    categories, layers = (
        _at_peak(trace, parts, events, [each.given for each in played[: peak + 1]])
        if what_is_alive or whole
        else ({}, ())
    )
    timeline = MemoryTimeline(
        points=tuple(
            _point(trace, part.stretch, each)
            for part, each in zip(parts, played, strict=False)
        ),
        allocated_bytes=allocated[peak],
        reserved_bytes=max(each.peak_reserved_bytes for each in played),
        at_peak_bytes=categories,
        at_peak_layers=layers,
        peak=peak,
        retries=allocator.retries,
        failed_bytes=_failed_bytes(allocator, trace, card, parts[len(played) - 1]),
    )
    if whole:
        _remember(key, timeline)
    return timeline


def _remember(key: tuple[Hashable, ...], timeline: MemoryTimeline) -> None:
    _KNOWN[key] = timeline
    if len(_KNOWN) > MOST_KNOWN:
        del _KNOWN[next(iter(_KNOWN))]


@lru_cache(maxsize=8)
def _program(
    trace: StepTrace,
    batch_size: int,
    then_batch_sizes: tuple[int, ...],
    micro_steps: int,
) -> tuple[list[Part], list[int]]:
    """Return the parts in the order in which they are played, and their events."""
    traced, events = with_micro_steps(trace, micro_steps)
    return schedule(trace, traced, batch_size, then_batch_sizes), events


@lru_cache(maxsize=8)
def _rounded_bytes(trace: StepTrace, samples: int, card: KernelCard) -> list[int]:
    sizes: list[int] = ((storage_bytes(trace, samples, card) + 511) & -512).tolist()
    return sizes


def _play(
    allocator: QuickAllocator | _SlowAllocator,
    trace: StepTrace,
    card: KernelCard,
    parts: Iterable[Part],
    events: list[int],
) -> Iterator[Played]:
    """Play one part after the other, up to the one in which the device is full."""
    for part in parts:
        sizes = _rounded_bytes(trace, part.samples, card)
        yield allocator.play(events[part.stretch.start : part.stretch.end], sizes)
        if allocator.failed_event is not None:
            return


def _failed_bytes(
    allocator: QuickAllocator | _SlowAllocator,
    trace: StepTrace,
    card: KernelCard,
    part: Part,
) -> int | None:
    """Return what was asked for, unrounded, where the device was full."""
    if allocator.failed_event is None:
        return None
    return int(storage_bytes(trace, part.samples, card)[allocator.failed_event - 1])


def _point(trace: StepTrace, stretch: Stretch, played: Played) -> TimelinePoint:
    return TimelinePoint(
        step=stretch.step,
        micro_step=stretch.micro_step,
        phase=stretch.phase,
        block=trace.block_names[stretch.block] if stretch.block >= 0 else "",
        allocated_bytes=played.peak_allocated_bytes,
        reserved_bytes=played.peak_reserved_bytes,
    )


def _at_peak(
    trace: StepTrace, parts: list[Part], events: list[int], given: list[list[int]]
) -> tuple[dict[str, int], tuple[tuple[str, int], ...]]:
    """Add up what is alive at the peak of the last part played, tails included.

    Args:
        trace: Says what each storage is.
        parts: What was played, and perhaps more.
        events: Of the parts.
        given: What each event of each part played was given.
    """
    happened = [
        events[part.stretch.start : part.stretch.start + len(blocks)]
        for part, blocks in zip(parts, given, strict=False)
    ]
    storages = np.fromiter(chain.from_iterable(happened), np.int64)
    blocks = np.fromiter(chain.from_iterable(given), np.int64)
    before = len(blocks) - len(given[-1])
    inside = np.cumsum(blocks)[before:]
    until = before + (int(inside.argmax()) + 1 if inside.size else 0)
    # What happened last to each storage, and what it was given then.
    numbers, latest = np.unique(np.abs(storages[:until])[::-1], return_index=True)
    last = blocks[:until][::-1][latest]
    alive, sizes = numbers[last > 0] - 1, last[last > 0]
    category = np.bincount(trace.category[alive], sizes, len(CATEGORIES))
    # Those outside every layer are first, those of the loss last.
    names = "", *trace.layers, LOSS, LOGITS_AND_LOSS
    own = trace.layer[alive]
    behind = len(trace.layers) + 1 + (own >= 0)
    places = np.where(loss_storages(trace)[alive], behind, own + 1)
    layers = np.bincount(places, sizes, len(names)).astype(np.int64).tolist()
    named = zip(names, layers, strict=True)
    largest = sorted(
        (row for row in named if row[1]), key=lambda item: (-item[1], item[0])
    )
    return (
        dict(zip(CATEGORIES, category.astype(np.int64).tolist(), strict=True)),
        tuple(largest[:LARGEST_LAYERS]),
    )


class AfterTraining:
    """Further steps of other batch sizes, each from where the same training ended.

    As ``replay`` with ``then_batch_sizes``, but the training is played once.
    """

    def __init__(
        self,
        trace: StepTrace,
        batch_size: int,
        gpu: Gpu,
        *,
        limit_bytes: int,
        micro_steps: int = 1,
    ) -> None:
        """Play the training; arguments as in ``replay``."""
        self._program = trace, batch_size, micro_steps
        self._card = kernel_card(gpu)
        self._allocator = QuickAllocator(limit_bytes)
        parts, events = _program(trace, batch_size, (), micro_steps)
        self._played = len(parts)
        self._play(parts, events)
        self._fits = self._allocator.failed_event is None
        self._state = self._allocator.state

    def retries(self, then_batch_sizes: tuple[int, ...]) -> int | None:
        """Return how often the cache is emptied in all; None where memory runs out."""
        if not self._fits:
            return None
        self._allocator.state = self._state
        trace, batch_size, micro_steps = self._program
        parts, events = _program(trace, batch_size, then_batch_sizes, micro_steps)
        self._play(parts[self._played :], events)
        if self._allocator.failed_event is not None:
            return None
        return self._allocator.retries

    def _play(self, parts: list[Part], events: list[int]) -> None:
        for _ in _play(self._allocator, self._program[0], self._card, parts, events):
            pass
