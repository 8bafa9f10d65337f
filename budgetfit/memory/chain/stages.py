"""Stages of the chain: what each one allocates and saves in a traced micro-step.

The steady micro-step is cut at its blocks. What runs before, between and after them
becomes a stage of its own, so that the chain covers the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from budgetfit.core.recipe import Segment
from budgetfit.core.step_trace import BlockPass, Phase, StepTrace
from budgetfit.memory.chain.live_bytes import LiveBytes, StorageEvents, lifetimes
from budgetfit.memory.scratch_sizes.rules import DeviceProperties

PROLOGUE, BETWEEN, EPILOGUE = "<prologue>", "<between>", "<epilogue>"


class Stage(NamedTuple):
    """One stage: a block or what runs around it, with its event ranges."""

    name: str
    block: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    output_storage: int
    output_bytes: int
    joins_next: bool


class StageBytes(NamedTuple):
    """Bytes of one stage in one trace, which add up to the bytes alive in a step.

    In its forward: static + saved and cached of the earlier stages + ``forward``. In
    its backward: static + saved of the earlier stages and its own + the gradient that
    comes in + gradients of the later stages + ``backward``.

    Attributes:
        saved: Live from the end of its forward to its backward.
        cached: Live from its forward to the end of the whole forward only.
        forward: Most bytes live in its forward, above the sum above.
        backward: Most bytes live in its backward, above the sum above.
        gradient: Weight gradients that it leaves behind, less those of earlier
            micro-batches that it frees, as FSDP2 does.
    """

    saved: int
    cached: int
    forward: int
    backward: int
    gradient: int


PassTimes = tuple[int, int]  # nanoseconds of a stage's forward and backward


class OptionTrace(NamedTuple):
    """A trace in which blocks have options of their own: one block per segment."""

    trace: StepTrace
    segments: tuple[Segment, ...]


TimesOf = Callable[[OptionTrace, Sequence[Stage]], Sequence[PassTimes]]


@dataclass(frozen=True, eq=False)
class MeasuredChain:
    """The stages of one trace with their bytes and times, by name."""

    live: LiveBytes
    chain: tuple[Stage, ...]
    static: int
    rows: dict[str, StageBytes]
    times: dict[str, PassTimes]

    @classmethod
    def of(
        cls,
        option_trace: OptionTrace,
        batch_size: int,
        device: DeviceProperties,
        times_of: TimesOf | None = None,
        **live_options: Any,
    ) -> MeasuredChain:
        """Cut a trace into stages and measure what each one costs.

        ``times_of`` returns the times of each stage's forward and backward, in
        nanoseconds (``timing``); None for no times. ``live_options`` are those of
        ``LiveBytes.of``.
        """
        live = LiveBytes.of(option_trace.trace, batch_size, device, **live_options)
        chain = stages(live)
        static, rows = stage_bytes(live, chain)
        times = times_of(option_trace, chain) if times_of else [(0, 0)] * len(chain)
        names = [stage.name for stage in chain]
        return cls(
            live,
            chain,
            static,
            dict(zip(names, rows, strict=True)),
            dict(zip(names, times, strict=True)),
        )

    @cached_property
    def optimizer_peak(self) -> int:
        """The most bytes alive in an optimizer step."""
        peaks = [
            self.live.peak(row.start, row.end)
            for row in self.live.trace.phases
            if row.name == "optimizer"
        ]
        return max(peaks, default=0)


def steady_micro_step(trace: StepTrace) -> tuple[int, int]:
    """Return (step, micro_step) of the last traced micro-batch: the steady state."""
    last = [row for row in trace.phases if row.name == "backward"][-1]
    return last.step, last.micro_step


def stages(live: LiveBytes) -> tuple[Stage, ...]:
    """Cut the steady micro-step into the stages of the chain, in execution order."""
    return tuple(
        stage
        if stage.output_storage < 0
        else stage._replace(output_bytes=int(live.sizes[stage.output_storage]))
        for stage in _cut(live.trace).chain
    )


class _Cut(NamedTuple):
    """The stages of a trace, and what else is the same at every batch size.

    Attributes:
        chain: The stages, without the bytes of their outputs.
        start: Events before the steady forward.
        transient: Events of what is freed before the backward: what of it is alive at a
            stage's end is cached.
        lasting: Events of what is allocated in the backward and still alive after it,
            or alive before the forward and freed in the backward: weight gradients.
        passed_on: Of each stage, whether later ones take its output and nothing saves
            it.
    """

    chain: tuple[Stage, ...]
    start: int
    transient: StorageEvents
    lasting: StorageEvents
    passed_on: tuple[bool, ...]


@lru_cache(maxsize=16)
def _cut(trace: StepTrace) -> _Cut:
    step = _SteadyStep.of(trace)
    forward, backward = step.forward, step.backward
    chain, life = tuple(step.stages()), lifetimes(trace)
    allocated_at, freed = life.alloc_event, life.free_event
    return _Cut(
        chain,
        forward.start,
        StorageEvents.of(
            trace, (allocated_at >= forward.start) & (freed < backward.start)
        ),
        StorageEvents.of(
            trace,
            (
                (allocated_at >= backward.start) & (freed >= backward.end)
                | (allocated_at < forward.start)
                & (freed >= backward.start)
                & (freed < backward.end)
            ),
        ),
        tuple(
            bool(
                stage.output_storage >= 0
                and forward.start
                <= allocated_at[stage.output_storage]
                < stage.forward[1]
                and stage.forward[1] <= freed[stage.output_storage] < backward.start
            )
            for stage in chain
        ),
    )


class _SteadyStep(NamedTuple):
    """The micro-step that is cut: its phases, and the passes of its blocks.

    ``passes`` are the forward passes; ``backwards`` the backward ones, by block.
    """

    trace: StepTrace
    forward: Phase
    backward: Phase
    passes: tuple[BlockPass, ...]
    backwards: dict[int, BlockPass]

    @classmethod
    def of(cls, trace: StepTrace) -> _SteadyStep:
        moment = steady_micro_step(trace)
        forward, backward = (
            next(
                row
                for row in trace.phases
                if (row.name, row.step, row.micro_step) == (name, *moment)
            )
            for name in ("forward", "backward")
        )
        rows = [row for row in trace.passes if (row.step, row.micro_step) == moment]
        return cls(
            trace,
            forward,
            backward,
            tuple(row for row in rows if row.direction == "forward"),
            {row.block: row for row in rows if row.direction == "backward"},
        )

    def stages(self) -> Iterator[Stage]:
        """Yield the stages, without the bytes of their outputs."""
        # Forwards are cut from the front, and their backwards from the end.
        position, back = self.forward.start, self.backward.end
        for index, row in enumerate(self.passes):
            if row.start > position:
                yield (around := self.before_block(index, position, back))
                back = around.backward[0]
            yield (block := self.block(index, back))
            position, back = block.forward[1], block.backward[0]
        yield self.epilogue(position, back)

    def before_block(self, index: int, position: int, back: int) -> Stage:
        """Return the stage from ``position`` to a block, with its backward."""
        row = self.passes[index]
        # Its backward comes after the block's own.
        found = self.backwards.get(row.block)
        return Stage(
            PROLOGUE if index == 0 else f"{BETWEEN}{index}",
            -1,
            (position, row.start),
            (found.end if found else back, back),
            row.input_storage,
            0,
            joins_next=False,
        )

    def block(self, index: int, back: int) -> Stage:
        """Return a block's stage; its backward is empty if it needs no gradient."""
        trace, row = self.trace, self.passes[index]
        found = self.backwards.get(row.block)
        is_last = index + 1 == len(self.passes)
        following = row.end if is_last else self.passes[index + 1].start
        # If only frees happen before the next block, they belong to this one.
        allocates = (trace.events[row.end : following] > 0).any()
        stop = row.end if allocates else following
        return Stage(
            trace.block_names[row.block],
            row.block,
            (row.start, stop),
            (found.start, found.end) if found else (back, back),
            row.output_storage,
            0,
            joins_next=not is_last and trace.joined[index] and stop == following,
        )

    def epilogue(self, position: int, back: int) -> Stage:
        """Return the stage after the blocks: the head and the loss."""
        return Stage(
            EPILOGUE,
            -1,
            (position, self.forward.end),
            (self.backward.start, back),
            -1,
            0,
            joins_next=False,
        )


def stage_bytes(
    live: LiveBytes, chain: Sequence[Stage]
) -> tuple[int, tuple[StageBytes, ...]]:
    """Return the static bytes of a trace and the bytes of each stage."""
    cut = _cut(live.trace)
    static = int(live.after[cut.start])
    ranges = np.array([(*stage.forward, *stage.backward) for stage in chain]).T
    transient = live.of_storages(cut.transient, ranges[1])
    begun, left = (live.of_storages(cut.lasting, moments) for moments in ranges[2:])
    alive = live.after[ranges[1]].tolist()
    prefix = cached = 0
    measured = []
    for index, stage in enumerate(chain):
        start, end = stage.forward
        begin, stop = stage.backward
        # The output is not cached: it is counted with the stage that takes it.
        passed_on = stage.output_bytes if cut.passed_on[index] else 0
        new_cached = transient[index] - passed_on
        total = alive[index] - static - stage.output_bytes
        new_prefix = total - new_cached
        measured.append(
            StageBytes(
                saved=new_prefix - prefix,
                cached=new_cached - cached,
                forward=live.peak(start, end) - static - prefix - cached,
                backward=live.peak(begin, stop) - static - new_prefix
                if stop > begin
                else 0,
                gradient=left[index] - begun[index],
            )
        )
        prefix, cached = new_prefix, new_cached
    return static, _backward_above_gradients(chain, measured)


def _backward_above_gradients(
    chain: Sequence[Stage], measured: Sequence[StageBytes]
) -> tuple[StageBytes, ...]:
    """Subtract from ``backward`` the incoming gradient and those of later stages."""
    later = 0
    result: list[StageBytes] = []
    for index in range(len(chain) - 1, -1, -1):
        row = measured[index]
        incoming = chain[index].output_bytes if index + 1 < len(chain) else 0
        backward = row.backward - incoming - later if row.backward else 0
        result.append(row._replace(backward=backward))
        later += row.gradient
    return tuple(reversed(result))


def max_stage_bytes(rows: Sequence[StageBytes]) -> StageBytes:
    """Return the most that a stage outside the blocks costs in any of the traces."""
    # It cannot be wrapped, and may still cost more once something else is recomputed:
    # an encoder's output lives on as the input of every recomputed decoder block, and
    # not at all where the decoder saves a low-precision copy. The maximum is valid for
    # every plan.
    saved = max(row.saved for row in rows)
    return StageBytes(
        saved=saved,
        cached=max(row.saved + row.cached for row in rows) - saved,
        forward=max(row.forward for row in rows),
        backward=max(row.backward for row in rows),
        gradient=max(row.gradient for row in rows),
    )
