"""The steady micro-step cut into the chain's stretches, in execution order.

What runs before, between and after the blocks becomes stations of its own, so that a
chain covers the whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from budgetfit.core.step_trace import BlockPass, StepTrace
    from budgetfit.memory.live_curve import LiveCurve

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
    trace = curve.trace
    step, micro_step = steady_moment(trace)
    forward_phase = curve.phase("forward", step, micro_step)
    backward_phase = curve.phase("backward", step, micro_step)
    rows = [
        row for row in trace.passes if (row.step, row.micro_step) == (step, micro_step)
    ]
    forward = [row for row in rows if row.direction == "forward"]
    backward = {row.block: row for row in rows if row.direction == "backward"}
    found: list[Station] = []
    position, back = forward_phase.start, backward_phase.end
    for index, row in enumerate(forward):
        if row.start > position:
            # Its backward comes after the block's own: from there to where we were.
            begin = backward[row.block].end if row.block in backward else back
            found.append(
                Station(
                    PROLOGUE if index == 0 else f"{BETWEEN}{index}",
                    -1,
                    (position, row.start),
                    (begin, back),
                    row.input_storage,
                    _output_bytes(curve, row.input_storage),
                    joins_next=False,
                )
            )
        begin, end = _backward_of(row, backward, back)
        following = forward[index + 1].start if index + 1 < len(forward) else row.end
        # Where only frees happen before the next block, they end this one.
        stop = row.end if _allocates(trace, row.end, following) else following
        found.append(
            Station(
                trace.block_names[row.block],
                row.block,
                (row.start, stop),
                (begin, end),
                row.output_storage,
                _output_bytes(curve, row.output_storage),
                joins_next=index + 1 < len(forward)
                and trace.joined[index]
                and stop == following,
            )
        )
        position, back = stop, begin
    found.append(
        Station(
            EPILOGUE,
            -1,
            (position, forward_phase.end),
            (backward_phase.start, back if forward else backward_phase.end),
            -1,
            0,
            joins_next=False,
        )
    )
    return tuple(found)


def _allocates(trace: StepTrace, start: int, end: int) -> bool:
    return bool((trace.events[start:end] > 0).any())


def _backward_of(
    row: BlockPass, backward: dict[int, BlockPass], back: int
) -> tuple[int, int]:
    """Return where a block's backward lies; empty where nothing needs gradients."""
    found = backward.get(row.block)
    return (found.start, found.end) if found else (back, back)


def _output_bytes(curve: LiveCurve, storage: int) -> int:
    return int(curve.sizes[storage]) if storage >= 0 else 0
