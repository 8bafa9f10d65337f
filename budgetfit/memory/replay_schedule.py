"""The order in which a trace is played: what is repeated, and at which batch size.

A trace has one or two micro-steps of two steps. Memory settles over several, so the
last micro-step and the last step are played again where they leave nothing behind.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from budgetfit.core.step_trace import BlockPass, Phase, StepTrace

PASSES = ("forward", "backward")
MICRO_REPEATS = 2  # micro-steps that are played beyond the traced ones
STEADY_REPEATS = 1  # the last traced step is played once more: memory has settled then


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


class Part(NamedTuple):
    """A stretch of the trace, played with so many samples per micro-batch."""

    stretch: Stretch
    samples: int


def with_micro_steps(
    trace: StepTrace, micro_steps: int
) -> tuple[list[Stretch], list[int]]:
    """Return the stretches with the untraced micro-steps, and all events.

    A later micro-step does what the last traced one did. That one's batch lives until
    the optimizer has run; those before it give theirs back, which adds events.
    """
    events = trace.events.tolist()
    result: list[Stretch] = []
    for _, rows in groupby(stretches(trace), key=attrgetter("step")):
        step = list(rows)
        last = step[-1].micro_step
        missing = min(micro_steps - 1 - last, MICRO_REPEATS)
        body = [row for row in step if row.micro_step == last and row.phase in PASSES]
        if missing < 1 or last < 1 or not body:
            result += step
            continue
        inside = events[body[0].start : body[-1].end]
        alive = {event for event in inside if event > 0}
        freed = {-event for event in inside if event < 0}
        if not freed <= alive:  # it takes something away: it cannot happen twice
            result += step
            continue
        left = sorted(alive - freed)
        tail = len(events), len(events) + len(left)
        events += [-event for event in left]
        before = step.index(body[0])
        result += step[:before]
        for number in range(last, last + missing):
            result += [row._replace(micro_step=number) for row in body]
            result.append(Stretch(body[0].step, number, "backward", -1, *tail))
        result += [row._replace(micro_step=last + missing) for row in step[before:]]
    return result, events


def schedule(
    trace: StepTrace,
    traced: list[Stretch],
    batch_size: int,
    then_batch_sizes: tuple[int, ...],
) -> list[Part]:
    """All stretches, the last step's once more where it leaves nothing behind."""
    whole = [phase for phase in trace.phases if phase.step == trace.phases[-1].step]
    last = max(stretch.step for stretch in traced)
    steady = [stretch for stretch in traced if stretch.step == last]
    played = [Part(stretch, batch_size) for stretch in traced]
    repeats = (batch_size,) * STEADY_REPEATS + then_batch_sizes
    if last < 1 or not _closed(trace.events[whole[0].start : whole[-1].end]):
        if then_batch_sizes:
            raise ValueError("the last step of this trace cannot be repeated")
        return played
    for number, samples in enumerate(repeats, start=last + 1):
        played += [Part(row._replace(step=number), samples) for row in steady]
    return played


def _closed(events: NDArray[np.int32]) -> bool:
    """Whether these events free what they allocate, and nothing else."""
    return bool(
        (np.sort(events[events > 0]) == np.sort(-events[events < 0])).all()
        if (events > 0).sum() == (events < 0).sum()
        else False
    )
