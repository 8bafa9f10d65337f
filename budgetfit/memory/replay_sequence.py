"""Replay of many training steps whose micro-batches have samples of several lengths.

The allocator keeps the blocks of one length and splits them for another: what is
reserved may grow for many steps, and far beyond what the longest batch takes alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from budgetfit.core.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from budgetfit.core.step_trace import StepTrace
from budgetfit.gpus.table import Gpu
from budgetfit.memory.caching_allocator import AllocatorState
from budgetfit.memory.make_allocator import make_allocator, rounded_bytes
from budgetfit.memory.replay import UNLIMITED_BYTES, device_properties, storage_bytes
from budgetfit.memory.replay_schedule import (
    PASSES,
    EventRange,
    storages_in_turns,
    with_micro_steps,
)

MOST_KNOWN: Final = 500  # micro-steps; an allocator's state takes about 0.1 MB


class Program(Protocol):
    """One program at every length: its traces differ in sizes only."""

    first: StepTrace

    def at(self, length: object) -> StepTrace:
        """Return the trace at a length."""


@dataclass(frozen=True, slots=True)
class SequencePeaks:
    """Peaks of a sequence of steps, in bytes, and how many were replayed."""

    allocated_bytes: int
    reserved_bytes: int
    updates: int


class StepSequence:
    """Replays updates of micro-batches of given lengths, each after the last."""

    def __init__(
        self,
        program_at: Callable[[Any], Program],
        gpu: Gpu,
        *,
        micro_steps: int = 1,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
    ) -> None:
        """Prepare a replay.

        ``program_at`` returns the program that runs at a length; ``micro_steps``:
        micro-batches in each update.
        """
        self._program_at, self._device = program_at, device_properties(gpu)
        self._micro_steps, self._settings = micro_steps, settings
        self._steps: dict[int, _Steps] = {}
        self._streams: dict[int, int] = {}  # of the storages of all programs
        self._sizes: dict[tuple[int, Any], list[int]] = {}
        self._known: dict[
            Hashable, tuple[AllocatorState, tuple[int, int], AllocatorState]
        ] = {}

    def peaks(
        self,
        updates: Sequence[Sequence[object]],
        *,
        longest_first: object = None,
        most_bytes: int = UNLIMITED_BYTES,
    ) -> SequencePeaks:
        """Replay a training, from its first update.

        Args:
            updates: The lengths (of images: height and width) of the micro-batches of
                each update; at least one.
            longest_first: The length of the forward and backward that are run before
                the first update, and again where gradients are accumulated.
            most_bytes: No further update is replayed once more is reserved.

        Raises:
            ValueError: An update does not free what it allocates.
        """
        starts = [lengths[0] for lengths in updates]
        if longest_first is not None:
            starts.insert(0, longest_first)
        # All of them, so that the allocator knows all streams.
        begun, *_ = [self._steps_at(length) for length in starts]
        # On a card that is smaller than the device there is no limit.
        self._allocator = make_allocator(
            UNLIMITED_BYTES, self._settings, UNLIMITED_BYTES - 1, self._streams
        )
        self._allocated = self._reserved = count = 0
        self._left: list[int] = []
        # Of the program that began: it has the storages that the next ones replace.
        early = [begun.first, *begun.unsettled]
        before, length = begun.setup, starts[0]
        if longest_first is not None:
            early = [begun.first_after_dry, *begun.unsettled[1:]]
            before = [*begun.setup, *begun.dry]
        self._run(begun, before, (length,))
        for lengths in updates:
            if count < len(early):
                self._run(begun, early[count], lengths)
                self._left = begun.found
            else:
                steps = self._steps_at(lengths[0])
                self._run(steps, steps.steady, lengths)
                self._left = steps.left_after(self._left)
            count += 1
            if self._reserved > most_bytes:
                break
        return SequencePeaks(self._allocated, self._reserved, count)

    def largest_block_bytes(self, length: object) -> int:
        """Return the most bytes that an update frees at once, at a length."""
        steps = self._steps_at(length)
        sizes = self._sizes_at(steps, length)
        events = _events_of(steps.events, steps.steady)
        return max((sizes[-event - 1] for event in events if event < 0), default=0)

    def _run(
        self, steps: _Steps, rows: Iterable[EventRange], lengths: Sequence[object]
    ) -> None:
        names = steps.names_after(self._left)
        for micro_step, unit in itertools.groupby(rows, lambda row: row.micro_step):
            # Of many micro-batches a few are replayed: ``with_micro_steps``.
            length = lengths[min(max(micro_step, 0), len(lengths) - 1)]
            ranges = tuple((row.start, row.end) for row in unit)
            # What finds the allocator as it found it the last time does the same.
            key = steps.offset, length, ranges, *names.items()
            before = self._allocator.state()
            known = self._known.get(key)
            if known is not None and known[0] == before:
                _, peaks, then = known
                self._allocator.restore(then)
            else:
                events = [n for start, end in ranges for n in steps.events[start:end]]
                if names:
                    events = [names.get(event, event) for event in events]
                found = self._allocator.run(events, self._sizes_at(steps, length))
                peaks = found.peak_allocated_bytes, found.peak_reserved_bytes
                self._known[key] = before, peaks, self._allocator.state()
                if len(self._known) > MOST_KNOWN:
                    del self._known[next(iter(self._known))]
            self._allocated = max(self._allocated, peaks[0])
            self._reserved = max(self._reserved, peaks[1])

    def _steps_at(self, length: object) -> _Steps:
        """Return the steps of the program at a length; storages are numbered apart."""
        program = self._program_at(length)
        key = id(program)
        if key not in self._steps:
            before = sum(
                len(each.program.first.fixed_bytes) for each in self._steps.values()
            )
            self._steps[key] = _Steps.of(program, self._micro_steps, before)
            own = program.first.side_streams()
            self._streams |= {storage + before: own[storage] for storage in own}
        return self._steps[key]

    def _sizes_at(self, steps: _Steps, length: object) -> list[int]:
        key = steps.offset, length
        if key not in self._sizes:
            trace = steps.program.at(length)
            sizes = storage_bytes(trace, trace.batch_sizes[0], self._device)
            rounded = rounded_bytes(sizes, self._settings).tolist()
            self._sizes[key] = [0] * steps.offset + rounded
        return self._sizes[key]


@dataclass(frozen=True, slots=True)
class _Steps:
    """The event ranges of a program's first and later updates.

    Attributes:
        events: Of all ranges; storages are counted from ``offset``.
        setup: Before the first update.
        first: The first update; it allocates what then stays.
        dry: A forward and backward alone, and then everything freed that an update
            frees. Two where gradients are accumulated: the second finds those of the
            first.
        first_after_dry: The first update, without what ``dry`` has allocated to stay.
            Where there is an unsettled one it is that, with the states of the optimizer
            made in it.
        unsettled: Updates between the first and those that repeat: in one DDP makes its
            buckets anew.
        steady: Every later update.
        found, left: Storages that the update before has left to such an update, and
            those that it leaves to the next: they take turns.
    """

    program: Program
    offset: int
    events: list[int]
    setup: list[EventRange]
    first: list[EventRange]
    dry: list[EventRange]
    first_after_dry: list[EventRange]
    unsettled: list[list[EventRange]]
    steady: list[EventRange]
    found: list[int]
    left: list[int]

    @classmethod
    def of(cls, program: Program, micro_steps: int, offset: int) -> _Steps:
        """Cut a trace into updates, which must leave as much as they found."""
        rows, events = with_micro_steps(program.first, micro_steps)
        last = rows[-1].step
        steady = [row for row in rows if row.step == last]
        turns = storages_in_turns(program.first, _events_of(events, steady))
        if last < 1 or turns is None:
            raise ValueError("the last step of this trace cannot be repeated")
        # Both ways round: the found ones come first.
        pairs = list(turns.items())[: len(turns) // 2]
        found, left = [each for each, _ in pairs], [each for _, each in pairs]
        first = [row for row in rows if row.step == 0]
        dry = [row for row in first if row.micro_step <= 1 and row.phase in PASSES]
        kept, dropped = _left_by(events, dry, first, found)
        # What is left is freed; what stays is not allocated again.
        dry.append(dry[-1]._replace(start=len(events), end=len(events) + len(dropped)))
        events += [-event for event in dropped]
        after = []
        for row in first:
            own = [event for event in events[row.start : row.end] if event not in kept]
            after.append(row._replace(start=len(events), end=len(events) + len(own)))
            events += own
        setup = [row for row in rows if row.step < 0]
        unsettled = [
            [row for row in rows if row.step == step] for step in range(1, last)
        ]
        if unsettled:
            after = _with_states(events, first, unsettled[0])
        shifted = [n and (n + offset if n > 0 else n - offset) for n in events]
        return cls(
            program,
            offset,
            shifted,
            setup,
            first,
            dry,
            after,
            unsettled,
            steady,
            [each + offset for each in found],
            [each + offset for each in left],
        )

    def names_after(self, left: list[int]) -> dict[int, int]:
        """Return the events to replace in an update, by what the last one left."""
        own = zip(self.left, self.left_after(left), strict=True)
        made = {old: new for old, new in own if old != new}
        others = zip(self.found, left, strict=False)
        return made | {-old: -new for old, new in others if old != new}

    def left_after(self, left: list[int]) -> list[int]:
        """Return the storages that an update leaves to the next one."""
        return self.found if left and left == self.left else self.left


def _events_of(events: list[int], rows: Iterable[EventRange]) -> list[int]:
    return [event for row in rows for event in events[row.start : row.end]]


def _left_by(
    events: list[int], dry: list[EventRange], first: list[EventRange], found: list[int]
) -> tuple[set[int], list[int]]:
    """Return what ``dry`` allocates to stay, and what is freed of it later."""
    # ``found``: what ``first`` leaves to the next update.
    inside = _events_of(events, dry)
    alive = {event for event in inside if event > 0} - {-n for n in inside if n < 0}
    freed = {-event for event in _events_of(events, first) if event < 0} | {*found}
    return alive - freed, sorted(alive & freed)


def _with_states(
    events: list[int], first: list[EventRange], second: list[EventRange]
) -> list[EventRange]:
    """Return the second update, whose optimizer makes what it does in the first."""
    # That is added to ``events``.
    made = _events_of(events, [row for row in first if row.phase == "optimizer"])
    freed = {-event for event in events if event < 0}
    states = [event for event in made if event > 0 and event not in freed]
    place = next(n for n, row in enumerate(second) if row.phase == "optimizer")
    row = second[place]._replace(start=len(events), end=len(events) + len(states))
    events += states
    return [*second[:place], row, *second[place:]]
