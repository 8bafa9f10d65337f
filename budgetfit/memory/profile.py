"""StepTraces -> what each block costs when kept and when recomputed (rule C).

The numbers are read off the curve of live bytes of two traces, one with everything kept
and one with every block recomputed. What runs outside the blocks can only be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.memory.live_curve import LiveCurve
from budgetfit.memory.stations import Station, stations, steady_moment

if TYPE_CHECKING:
    from budgetfit.core.block_profile import Mode
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.memory.kernel_scratch import KernelCard

TimesOf = Callable[[Sequence[Station]], Sequence[tuple[int, int]]]


class StationBytes(NamedTuple):
    """What one station costs in one trace; the letters of rule C."""

    saved: int
    cached: int
    forward: int
    backward: int
    gradient: int


def station_bytes(
    curve: LiveCurve, chain: Sequence[Station]
) -> tuple[int, tuple[StationBytes, ...]]:
    """Return W and each station's S, c, f, b and g in one trace."""
    step, micro_step = steady_moment(curve.trace)
    forward = curve.phase("forward", step, micro_step)
    backward = curve.phase("backward", step, micro_step)
    static = int(curve.after[forward.start])
    in_forward = curve.birth >= forward.start
    prefix = cached = 0
    measured = []
    for station in chain:
        start, end = station.forward
        begin, stop = station.backward
        # Alive at the end of this forward, gone before the backward begins.
        passing = (
            in_forward
            & (curve.birth < end)
            & (curve.death >= end)
            & (curve.death < backward.start)
        )
        # Its output is not cached: it belongs to the station that takes it.
        output = station.output_storage
        handed_on = station.output_bytes if output >= 0 and passing[output] else 0
        new_cached = int(curve.sizes[passing].sum()) - handed_on
        total = int(curve.after[end]) - static - station.output_bytes
        new_prefix = total - new_cached
        grows = (
            (curve.birth >= begin)
            & (curve.birth < stop)
            & (curve.death >= backward.end)
            & (curve.birth >= backward.start)
        )
        measured.append(
            StationBytes(
                saved=new_prefix - prefix,
                cached=new_cached - cached,
                forward=curve.most(start, end) - static - prefix - cached,
                backward=curve.most(begin, stop) - static - new_prefix
                if stop > begin
                else 0,
                gradient=int(curve.sizes[grows].sum()),
            )
        )
        prefix, cached = new_prefix, new_cached
    return static, _above_the_base(chain, measured)


def _above_the_base(
    chain: Sequence[Station], measured: Sequence[StationBytes]
) -> tuple[StationBytes, ...]:
    """Let b count above prefix + incoming gradient + gradients of later stations."""
    later = 0
    result: list[StationBytes] = []
    for index in range(len(chain) - 1, -1, -1):
        row = measured[index]
        incoming = chain[index].output_bytes if index + 1 < len(chain) else 0
        backward = row.backward - incoming - later if row.backward else 0
        result.append(row._replace(backward=backward))
        later += row.gradient
    return tuple(reversed(result))


def chain_profile(  # noqa: PLR0913, PLR0917 - one value each, in this order
    kept: StepTrace,
    recomputed: StepTrace | None,
    batch_size: int,
    card: KernelCard,
    times_of: TimesOf | None = None,
    optimizer_ns: int = 0,
    *,
    expandable_segments: bool = False,
) -> ChainProfile:
    """Return the chain at ``batch_size``: sizes from the traces, times as given.

    Args:
        kept: A trace with nothing recomputed.
        recomputed: A trace with every block recomputed by itself; None for a chain that
            can only be kept.
        batch_size: Samples per micro-batch.
        card: Sizes the kernels' scratch memory.
        times_of: Says how long each station's forward and backward take, in
            nanoseconds (``timing``); None for no times.
        optimizer_ns: Time of one optimizer step.
        expandable_segments: The allocator setting, which decides on block tails.
    """
    curve = LiveCurve.of(
        kept, batch_size, card, expandable_segments=expandable_segments
    )
    chain = stations(curve)
    static, keep_bytes = station_bytes(curve, chain)
    again: dict[str, StationBytes] = {}
    if recomputed is not None:
        other = LiveCurve.of(
            recomputed, batch_size, card, expandable_segments=expandable_segments
        )
        other_chain = stations(other)
        other_static, rows = station_bytes(other, other_chain)
        static = max(static, other_static)
        again = {s.name: row for s, row in zip(other_chain, rows, strict=True)}
        keep_bytes = tuple(
            row if station.block >= 0 else _worse(row, again.get(station.name, row))
            for station, row in zip(chain, keep_bytes, strict=True)
        )
    times = times_of(chain) if times_of is not None else [(0, 0)] * len(chain)
    blocks = tuple(
        BlockProfile(
            name=station.name,
            options=_options(station, row, again.get(station.name), forward_ns),
            gradient_bytes=row.gradient,
            output_bytes=station.output_bytes,
            forward_ns=forward_ns,
            backward_ns=backward_ns,
            joins_next=station.joins_next,
        )
        for station, row, (forward_ns, backward_ns) in zip(
            chain, keep_bytes, times, strict=True
        )
    )
    gradients = sum(row.gradient for row in keep_bytes)
    return ChainProfile(
        batch_size=batch_size,
        static_bytes=static,
        input_bytes=0,
        optimizer_bytes=max(0, _optimizer_peak(curve) - static - gradients),
        optimizer_ns=optimizer_ns,
        blocks=blocks,
    )


def _worse(one: StationBytes, other: StationBytes) -> StationBytes:
    """What cannot be wrapped may still cost more once something else is recomputed.

    An encoder's output, for one, lives on as the input of every recomputed decoder
    block and not at all where the decoder saves a low-precision copy. The larger value
    holds for every plan.
    """
    saved = max(one.saved, other.saved)
    return StationBytes(
        saved=saved,
        cached=max(one.saved + one.cached, other.saved + other.cached) - saved,
        forward=max(one.forward, other.forward),
        backward=max(one.backward, other.backward),
        gradient=max(one.gradient, other.gradient),
    )


def _options(
    station: Station, keep: StationBytes, again: StationBytes | None, forward_ns: int
) -> tuple[BlockOption, ...]:
    def option(mode: Mode, row: StationBytes, extra_ns: int) -> BlockOption:
        return BlockOption(
            mode=mode,
            saved_bytes=row.saved,
            forward_bytes=row.forward,
            backward_bytes=row.backward,
            cached_bytes=row.cached,
            extra_ns=extra_ns,
        )

    kept = option("keep", keep, 0)
    if station.block < 0 or again is None:
        return (kept,)
    return (kept, option("recompute", again, forward_ns))


def _optimizer_peak(curve: LiveCurve) -> int:
    peaks = [
        curve.most(row.start, row.end)
        for row in curve.trace.phases
        if row.name == "optimizer"
    ]
    return max(peaks, default=0)
