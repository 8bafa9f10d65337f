"""Replay a StepTrace through the CUDA caching allocator at a batch size, on a GPU.

Every memory figure that a user sees comes from here. Sizes are scaled to the batch, the
GPU's kernel rules size the kernels' scratch memory, and mallocs and frees are simulated
in the order in which training would make them.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from budgetfit.core.budget import Budget
from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.core.step_trace import CATEGORIES, StepTrace
from budgetfit.gpus.table import Gpu
from budgetfit.memory.caching_allocator import AllocatorRun, AllocatorState
from budgetfit.memory.loss_storages import LOGITS_AND_LOSS, LOSS, loss_storages
from budgetfit.memory.make_allocator import (
    SimulatedAllocator,
    make_allocator,
    rounded_bytes,
)
from budgetfit.memory.replay_schedule import (
    COLLECTING_REPEATS,
    STEADY_REPEATS,
    EventRange,
    ScheduledRange,
    last_step,
    schedule,
    units_of,
    with_micro_steps,
)
from budgetfit.memory.scratch_sizes.rules import DeviceProperties, scratch_bytes
from budgetfit.memory.segment_addresses import SegmentAddresses

MAX_LAYERS_SHOWN = 12  # shown at the peak
UNLIMITED_BYTES = 1 << 60  # more than any device has, or any plan asks for
# A batch size is replayed to check that it fits, then to be shown. A limit that is not
# reached changes nothing, so it is part of the key only where it is.
MAX_CACHED_TIMELINES = 32
_TIMELINES: dict[tuple[Hashable, ...], MemoryTimeline] = {}


class EventReplay(NamedTuple):
    """A replay event by event: ``parts`` are ranges of ``events``, in order.

    ``sizes`` are the storages' rounded requests, ``allocator`` a new one.
    """

    parts: list[ScheduledRange]
    events: list[int]
    sizes: list[int]
    allocator: SimulatedAllocator


def device_properties(gpu: Gpu) -> DeviceProperties:
    """Return the properties of a GPU that kernel rules depend on."""
    return DeviceProperties(gpu.compute_capability, gpu.sm_count, gpu.threads_per_sm)


def storage_bytes(
    trace: StepTrace, batch_size: int, device: DeviceProperties
) -> NDArray[np.int64]:
    """Return the requested bytes of every storage at ``batch_size``, unrounded.

    Raises:
        ValueError: The trace is valid for another batch size only.
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
            known[key] = scratch_bytes(device, *key)
        values[number] = known[key][row.part]
    ruled = trace.scratch_index >= 0
    sizes[ruled] = values[trace.scratch_index[ruled]]
    return sizes


@lru_cache(maxsize=8)  # a chunked loss is compared with the same trace each time
def block_bytes(
    trace: StepTrace,
    batch_size: int,
    device: DeviceProperties,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> NDArray[np.int64]:
    """Return the size of the allocator block of every storage."""
    # That is the request rounded up, plus a remainder too small to be split off.
    # Remainders depend on the earlier allocations, so the trace is replayed, on a
    # device without a limit.
    blocks = np.zeros(trace.fixed_bytes.size, np.int64)
    # On a card that is smaller than the device there is no limit.
    allocator = make_allocator(
        UNLIMITED_BYTES, settings, UNLIMITED_BYTES - 1, trace.side_streams()
    )
    result = allocator.run(
        trace.events.tolist(), _rounded_bytes(trace, device, settings, batch_size)
    )
    mallocs = trace.events > 0
    blocks[trace.events[mallocs] - 1] = result.deltas[mallocs]
    blocks.flags.writeable = False  # it is cached
    return blocks


def replay(  # noqa: PLR0913 - a trace, a GPU and the settings of a run
    trace: StepTrace,
    batch_size: int,
    gpu: Gpu,
    *,
    limit_bytes: int | None = None,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    then_batch_sizes: tuple[int, ...] = (),
    micro_steps: int = 1,
    breakdown: bool = True,
) -> MemoryTimeline:
    """Replay the trace through the caching allocator and return its memory timeline.

    The last traced step runs twice, so that it is also seen in the steady state, and
    more often where the allocator collects garbage, which takes longer to settle. Of
    the micro-steps that were not traced up to two are run: reserved memory settles by
    then.
    Steps of ``then_batch_sizes`` follow, such as the smaller last batch of an epoch and
    the full ones after it: their sizes meet the blocks that are cached.

    Args:
        trace: The steps to replay.
        batch_size: Samples per micro-batch.
        gpu: Its kernel rules size the scratch memory.
        limit_bytes: Memory of the device; None for all of the GPU's. More than the
            GPU has means no limit, not that of ``settings`` either.
        settings: Those of the allocator.
        then_batch_sizes: Samples per micro-batch of further steps.
        micro_steps: Micro-batches in each step.
        breakdown: Break the peak down by category and layer also where memory ran out
            or the cache had to be emptied.

    Raises:
        ValueError: The trace is not valid for one of the batch sizes, or its last step
            cannot be repeated at another.
    """
    device = device_properties(gpu)
    card_bytes = gpu.total_bytes
    limit_bytes = card_bytes if limit_bytes is None else limit_bytes
    most = settings.within(limit_bytes, card_bytes)
    collects = settings.collect_above_bytes(card_bytes)
    repeats = steady_repeats(settings, gpu)
    program = trace, batch_size, then_batch_sizes, micro_steps, repeats
    key = *program, device, settings, collects, SegmentAddresses.rise
    known = _TIMELINES.get(key)
    if known is not None and known.reserved_bytes <= most:
        return known
    within = *key, limit_bytes, most, breakdown
    if within in _TIMELINES:
        return _TIMELINES[within]
    parts, events = _program(*program)
    allocator = make_allocator(limit_bytes, settings, card_bytes, trace.side_streams())
    sizes = partial(_rounded_bytes, trace, device, settings)
    runs: list[AllocatorRun] = []
    loading_retries = 0  # which empty what loading left cached, and cost nothing later
    for part, run in zip(parts, _run(allocator, sizes, parts, events), strict=False):
        runs.append(run)
        if part.event_range.step < 0:
            loading_retries = allocator.retries
    allocated = [each.peak_allocated_bytes for each in runs]
    peak = allocated.index(max(allocated))
    complete = allocator.failed_event is None and allocator.retries == 0
    categories, layers = (
        _at_peak(trace, parts, events, [each.deltas for each in runs[: peak + 1]])
        if breakdown or complete
        else ({}, ())
    )
    timeline = MemoryTimeline(
        points=tuple(
            _point(trace, part.event_range, each)
            for part, each in zip(parts, runs, strict=False)
        ),
        allocated_bytes=allocated[peak],
        reserved_bytes=max(each.peak_reserved_bytes for each in runs),
        at_peak_bytes=categories,
        at_peak_layers=layers,
        peak=peak,
        retries=allocator.retries - loading_retries,
        failed_bytes=_failed_bytes(allocator, trace, device, parts[len(runs) - 1]),
    )
    _cache(key if complete else within, timeline)
    return timeline


def setup_fits(
    trace: StepTrace,
    batch_size: int,
    gpu: Gpu,
    budget: Budget,
) -> bool:
    """Whether what happens before the first step fits into a budget."""
    sizes = _rounded_bytes(trace, device_properties(gpu), budget.allocator, batch_size)
    allocator = make_allocator(
        budget.usable_bytes, budget.allocator, gpu.total_bytes, trace.side_streams()
    )
    allocator.run(trace.events[: trace.phases[0].end].tolist(), sizes)
    return allocator.failed_event is None


def unlimited_replay(
    trace: StepTrace,
    batch_size: int,
    gpu: Gpu,
    *,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    micro_steps: int = 1,
) -> EventReplay:
    """Return what ``replay`` runs without a limit, to run it again.

    Arguments as for ``replay``.
    """
    repeats = steady_repeats(settings, gpu)
    parts, events = _program(trace, batch_size, (), micro_steps, repeats)
    return EventReplay(
        parts,
        events,
        _rounded_bytes(trace, device_properties(gpu), settings, batch_size),
        make_allocator(
            UNLIMITED_BYTES, settings, gpu.total_bytes, trace.side_streams()
        ),
    )


def steady_repeats(settings: AllocatorSettings, gpu: Gpu) -> int:
    """Return how often the last traced step is repeated until memory has settled."""
    collects = settings.collect_above_bytes(gpu.total_bytes)
    return STEADY_REPEATS if collects is None else COLLECTING_REPEATS


def _cache(key: tuple[Hashable, ...], timeline: MemoryTimeline) -> None:
    _TIMELINES[key] = timeline
    if len(_TIMELINES) > MAX_CACHED_TIMELINES:
        del _TIMELINES[next(iter(_TIMELINES))]


@lru_cache(maxsize=8)
def _program(
    trace: StepTrace,
    batch_size: int,
    then_batch_sizes: tuple[int, ...],
    micro_steps: int,
    steady_repeats: int = STEADY_REPEATS,
) -> tuple[list[ScheduledRange], list[int]]:
    """Return the schedule, and the events that it refers to."""
    traced, events = with_micro_steps(trace, micro_steps)
    parts = schedule(
        trace, traced, events, batch_size, then_batch_sizes, steady_repeats
    )
    return parts, events


@lru_cache(maxsize=8)
def _rounded_bytes(
    trace: StepTrace,
    device: DeviceProperties,
    settings: AllocatorSettings,
    samples: int,
) -> list[int]:
    sizes = rounded_bytes(storage_bytes(trace, samples, device), settings)
    listed: list[int] = sizes.tolist()
    return listed


def _run(
    allocator: SimulatedAllocator,
    sizes_at: Callable[[int], list[int]],
    parts: Iterable[ScheduledRange],
    events: list[int],
) -> Iterator[AllocatorRun]:
    """Run one event range after the other, until memory runs out.

    A unit that finds the allocator as it found it the last time is not run again: it
    does the same. That is a third of a step's micro-steps.

    ``sizes_at`` returns the rounded requests at a number of samples.
    """
    units = list(units_of(parts))
    keys = [
        tuple((row.start, row.end, samples) for row, samples in unit) for unit in units
    ]
    times = Counter(keys)
    known: dict[Hashable, tuple[AllocatorState, list[AllocatorRun], AllocatorState]]
    known = {}
    for key, unit in zip(keys, units, strict=True):
        before = allocator.state() if times[key] > 1 else None
        if before is not None and key in known and known[key][0] == before:
            _, runs, after = known[key]
            allocator.restore(after)
            yield from runs
            continue
        runs = []
        for part in unit:
            inside = events[part.event_range.start : part.event_range.end]
            runs.append(allocator.run(inside, sizes_at(part.samples)))
            yield runs[-1]
            if allocator.failed_event is not None:
                return
        if before is not None:
            known[key] = before, runs, allocator.state()


def _failed_bytes(
    allocator: SimulatedAllocator,
    trace: StepTrace,
    device: DeviceProperties,
    part: ScheduledRange,
) -> int | None:
    """Return the unrounded request that ran out of memory, if any."""
    if allocator.failed_event is None:
        return None
    return int(storage_bytes(trace, part.samples, device)[allocator.failed_event - 1])


def _point(
    trace: StepTrace, event_range: EventRange, run: AllocatorRun
) -> TimelinePoint:
    return TimelinePoint(
        step=event_range.step,
        micro_step=event_range.micro_step,
        phase=event_range.phase,
        block=trace.block_names[event_range.block] if event_range.block >= 0 else "",
        allocated_bytes=run.peak_allocated_bytes,
        reserved_bytes=run.peak_reserved_bytes,
    )


def _at_peak(
    trace: StepTrace,
    parts: list[ScheduledRange],
    events: list[int],
    deltas: list[NDArray[np.int64]],
) -> tuple[dict[str, int], tuple[tuple[str, int], ...]]:
    """Return the live bytes by category and layer at the peak of the last range run.

    In block sizes, unsplit remainders included.

    ``deltas``: the change of allocated bytes at each event of each range that was run.
    """
    numbers = np.array(events)
    happened = [
        numbers[part.event_range.start : part.event_range.start + len(blocks)]
        for part, blocks in zip(parts, deltas, strict=False)
    ]
    storages, blocks = np.concatenate(happened), np.concatenate(deltas)
    before = len(blocks) - len(deltas[-1])
    inside = np.cumsum(blocks)[before:]
    until = before + (int(inside.argmax()) + 1 if inside.size else 0)
    # Of several values for one place, numpy keeps the last: that of the last event.
    last = np.zeros(trace.fixed_bytes.size + 1, np.int64)
    last[np.abs(storages[:until])] = blocks[:until]
    alive = np.flatnonzero(last > 0) - 1
    sizes = last[alive + 1]
    category = np.bincount(trace.category[alive], sizes, len(CATEGORIES))
    # Storages outside of all layers come first, those of the loss last.
    names = "", *trace.layers, LOSS, LOGITS_AND_LOSS
    own = trace.layer[alive]
    of_loss = len(trace.layers) + 1 + (own >= 0)
    places = np.where(loss_storages(trace)[alive], of_loss, own + 1)
    layers = np.bincount(places, sizes, len(names)).astype(np.int64).tolist()
    named = zip(names, layers, strict=True)
    largest = sorted(
        (row for row in named if row[1]), key=lambda item: (-item[1], item[0])
    )
    return (
        dict(zip(CATEGORIES, category.astype(np.int64).tolist(), strict=True)),
        tuple(largest[:MAX_LAYERS_SHOWN]),
    )


class ReplayAfterTraining:
    """Replay steps of other batch sizes, each after the same training.

    As ``replay`` with ``then_batch_sizes``, but the training is replayed only once.
    """

    def __init__(  # noqa: PLR0913 - as ``replay``
        self,
        trace: StepTrace,
        batch_size: int,
        gpu: Gpu,
        budget: Budget,
        *,
        limit_bytes: int | None = None,
        micro_steps: int = 1,
        repeats: int = STEADY_REPEATS,
        followed: StepTrace | None = None,
    ) -> None:
        """Replay the training within a limit; other arguments as in ``replay``.

        Without ``limit_bytes`` that is what the budget has for it. ``repeats``: of the
        last traced step. ``followed``: the trace with one more step, which runs after
        the training; without it the last step of the training does.
        """
        self._program = trace, batch_size, micro_steps, repeats
        self._next_step = None if followed is None else last_step(followed)
        self._sizes_at = partial(
            _rounded_bytes, followed or trace, device_properties(gpu), budget.allocator
        )
        self._trained = make_allocator(
            budget.usable_bytes if limit_bytes is None else limit_bytes,
            budget.allocator,
            gpu.total_bytes,
            trace.side_streams(),
        )
        parts, events = _program(trace, batch_size, (), micro_steps, repeats)
        self._scheduled = len(parts)
        self._reserved_bytes = self._run(self._trained, parts, events)

    def retries(self, then_batch_sizes: tuple[int, ...]) -> int | None:
        """Return how often the cache is emptied in total; None: out of memory."""
        if self._trained.failed_event is not None:
            return None
        allocator, _ = self._then(then_batch_sizes)
        return None if allocator.failed_event is not None else allocator.retries

    def reserved_bytes(self, then_batch_sizes: tuple[int, ...]) -> int:
        """Return the most that is reserved, in training and in further steps."""
        return max(self._reserved_bytes, self._then(then_batch_sizes)[1])

    def _then(
        self, then_batch_sizes: tuple[int, ...]
    ) -> tuple[SimulatedAllocator, int]:
        allocator = self._trained.copy()
        if self._next_step is not None:
            rows, events = self._next_step
            parts = [ScheduledRange(row, n) for n in then_batch_sizes for row in rows]
            return allocator, self._run(allocator, parts, events)
        trace, batch_size, micro_steps, repeats = self._program
        parts, events = _program(
            trace, batch_size, then_batch_sizes, micro_steps, repeats
        )
        return allocator, self._run(allocator, parts[self._scheduled :], events)

    def _run(
        self,
        allocator: SimulatedAllocator,
        parts: list[ScheduledRange],
        events: list[int],
    ) -> int:
        """Run events and return the most that was reserved."""
        runs = _run(allocator, self._sizes_at, parts, events)
        return max((each.peak_reserved_bytes for each in runs), default=0)
