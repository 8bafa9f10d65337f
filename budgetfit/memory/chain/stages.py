"""The steady micro-step cut into the chain's stretches, in execution order.

What runs before, between and after the blocks becomes stations of its own, so that a
chain covers the whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from budgetfit.core.step_trace import BlockPass, Phase, StepTrace
    from budgetfit.memory.chain.live_bytes import LiveCurve

PROLOGUE, BETWEEN, EPILOGUE = "<prologue>", "<between>", "<epilogue>"


class Station(NamedTuple):
    """A stretch of the chain: where its forward and its backward lie in the events."""

    name: str
    block: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    output_storage: int
    output_bytes: int
    joins_next: bool


def steady_moment(trace: StepTrace) -> tuple[int, int]:
    """Return (step, micro_step) of the last traced micro-batch: the steady one."""
    last = [row for row in trace.phases if row.name == "backward"][-1]
    return last.step, last.micro_step


def stations(curve: LiveCurve) -> tuple[Station, ...]:
    """Cut the steady micro-step into the chain's stretches, in execution order."""
    step = _SteadyStep.of(curve)
    found: list[Station] = []
    # Forwards are cut from the front, and their backwards from the end.
    position, back = step.forward.start, step.backward.end
    for index, row in enumerate(step.passes):
        if row.start > position:
            found.append(step.before_block(index, position, back))
            back = found[-1].backward[0]
        found.append(step.block(index, back))
        position, back = found[-1].forward[1], found[-1].backward[0]
    found.append(step.epilogue(position, back))
    return tuple(found)


class _SteadyStep(NamedTuple):
    """The micro-step that is cut: its phases, and the passes of its blocks.

    ``passes`` are the forward ones; ``backwards`` the other ones, by block.
    """

    curve: LiveCurve
    forward: Phase
    backward: Phase
    passes: tuple[BlockPass, ...]
    backwards: dict[int, BlockPass]

    @classmethod
    def of(cls, curve: LiveCurve) -> _SteadyStep:
        moment = steady_moment(curve.trace)
        rows = [
            row for row in curve.trace.passes if (row.step, row.micro_step) == moment
        ]
        return cls(
            curve,
            curve.phase("forward", *moment),
            curve.phase("backward", *moment),
            tuple(row for row in rows if row.direction == "forward"),
            {row.block: row for row in rows if row.direction == "backward"},
        )

    def before_block(self, index: int, position: int, back: int) -> Station:
        """Return what runs from ``position`` to a block; backward, until ``back``."""
        row = self.passes[index]
        # Its backward comes after the block's own.
        found = self.backwards.get(row.block)
        return Station(
            PROLOGUE if index == 0 else f"{BETWEEN}{index}",
            -1,
            (position, row.start),
            (found.end if found else back, back),
            row.input_storage,
            self._output_bytes(row.input_storage),
            joins_next=False,
        )

    def block(self, index: int, back: int) -> Station:
        """Return a block's station; its backward is empty where nothing needs one."""
        trace, row = self.curve.trace, self.passes[index]
        found = self.backwards.get(row.block)
        is_last = index + 1 == len(self.passes)
        following = row.end if is_last else self.passes[index + 1].start
        # Where only frees happen before the next block, they end this one.
        stop = row.end if _allocates(trace, row.end, following) else following
        return Station(
            trace.block_names[row.block],
            row.block,
            (row.start, stop),
            (found.start, found.end) if found else (back, back),
            row.output_storage,
            self._output_bytes(row.output_storage),
            joins_next=not is_last and trace.joined[index] and stop == following,
        )

    def epilogue(self, position: int, back: int) -> Station:
        """Return what follows the blocks: the head and the loss."""
        return Station(
            EPILOGUE,
            -1,
            (position, self.forward.end),
            (self.backward.start, back),
            -1,
            0,
            joins_next=False,
        )

    def _output_bytes(self, storage: int) -> int:
        return int(self.curve.sizes[storage]) if storage >= 0 else 0


def _allocates(trace: StepTrace, start: int, end: int) -> bool:
    return bool((trace.events[start:end] > 0).any())
