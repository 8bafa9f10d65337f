"""StepTraces -> what each block costs under each option (rule C).

The numbers are read off the curves of live bytes: of a trace with everything kept, of
one with every block recomputed, and of probes, in which blocks have other options. What
runs outside the blocks can only be kept.

A probe need not try every option on every block: blocks of one type, which run the same
ops on the same sizes, differ from each other by their places alone. So a block's option
is what it costs kept (or recomputed), plus what that option changed on a block of its
type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.memory.live_curve import LiveCurve
from budgetfit.memory.station_bytes import StationBytes, station_bytes, worst
from budgetfit.memory.stations import Station, stations, steady_moment

if TYPE_CHECKING:
    from budgetfit.core.block_profile import Mode
    from budgetfit.core.recipe import Segment
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.memory.kernel_scratch import KernelCard

PassTimes = tuple[int, int]  # nanoseconds of a station's forward and backward


class Probe(NamedTuple):
    """A trace in which blocks have options of their own: one block per segment."""

    trace: StepTrace
    segments: tuple[Segment, ...]


TimesOf = Callable[[Probe, Sequence[Station]], Sequence[PassTimes]]


@dataclass(frozen=True, eq=False)
class _Measured:
    """One trace, measured: a row for each station, by name."""

    curve: LiveCurve
    chain: tuple[Station, ...]
    static: int
    rows: dict[str, StationBytes]
    times: dict[str, PassTimes]

    @classmethod
    def of(cls, probe: Probe, curve: LiveCurve, times_of: TimesOf | None) -> _Measured:
        chain = stations(curve)
        static, rows = station_bytes(curve, chain)
        times = times_of(probe, chain) if times_of else [(0, 0)] * len(chain)
        names = [station.name for station in chain]
        return cls(
            curve,
            chain,
            static,
            dict(zip(names, rows, strict=True)),
            dict(zip(names, times, strict=True)),
        )

    @cached_property
    def optimizer_peak(self) -> int:
        peaks = [
            self.curve.most(row.start, row.end)
            for row in self.curve.trace.phases
            if row.name == "optimizer"
        ]
        return max(peaks, default=0)


def chain_profile(  # noqa: PLR0913 - one value each, all needed
    kept: StepTrace,
    recomputed: Probe | None,
    batch_size: int,
    card: KernelCard,
    times_of: TimesOf | None = None,
    *,
    probes: Sequence[Probe] = (),
    types: Mapping[str, int] | None = None,
    optimizer_ns: int = 0,
    expandable_segments: bool = False,
    tails: bool = True,
) -> ChainProfile:
    """Return the chain at ``batch_size``: sizes from the traces, times as given.

    Args:
        kept: A trace with nothing recomputed.
        recomputed: A trace with every block recomputed by itself; None for a chain that
            can only be kept.
        batch_size: Samples per micro-batch.
        card: Sizes the kernels' scratch memory.
        times_of: Says how long each station's forward and backward take in a trace, in
            nanoseconds (``timing``); None for no times.
        probes: Traces that try further options on some blocks, the rest recomputed.
        types: Each block's type, as ``block_types`` tells; needed with ``probes``.
        optimizer_ns: Time of one optimizer step.
        expandable_segments: The allocator setting, which decides on block tails.
        tails: See ``LiveCurve.of``.
    """

    def measured(probe: Probe) -> _Measured:
        curve = LiveCurve.of(
            probe.trace,
            batch_size,
            card,
            expandable_segments=expandable_segments,
            tails=tails,
        )
        return _Measured.of(probe, curve, times_of)

    plain = measured(Probe(kept, ()))
    again = measured(recomputed) if recomputed is not None else None
    others = [(probe, measured(probe)) for probe in probes]
    everything = [plain, *([again] if again else []), *(each for _, each in others)]
    fixed = {
        station.name: worst([m.rows[station.name] for m in everything])
        for station in plain.chain
        if station.block < 0 and all(station.name in m.rows for m in everything)
    }
    rows = plain.rows | fixed
    extra = _options_by_type(plain, again, others, types or {})
    blocks = tuple(
        BlockProfile(
            name=station.name,
            options=(
                _option("keep", rows[station.name], 0),
                *_recompute(station, plain, again),
                *(
                    each
                    for change in extra.get((types or {}).get(station.name, -1), ())
                    if (each := change.on(station.name, plain, again)) is not None
                ),
            ),
            gradient_bytes=rows[station.name].gradient,
            output_bytes=station.output_bytes,
            forward_ns=plain.times[station.name][0],
            backward_ns=plain.times[station.name][1],
            joins_next=station.joins_next,
        )
        for station in plain.chain
    )
    static = max(each.static for each in everything)
    gradients = sum(row.gradient for row in rows.values())
    return ChainProfile(
        batch_size=batch_size,
        static_bytes=static,
        input_bytes=0,
        optimizer_bytes=max(0, plain.optimizer_peak - static - gradients),
        optimizer_ns=optimizer_ns,
        blocks=blocks,
    )


def with_other_epilogue(  # noqa: PLR0913, PLR0917 - one value each, in this order
    chain: ChainProfile,
    before: Probe,
    after: Probe,
    batch_size: int,
    card: KernelCard,
    times_of: TimesOf | None = None,
    *,
    tails: bool = True,
) -> ChainProfile:
    """Return the chain with what comes behind the blocks changed: a loss in parts.

    Args:
        chain: The chain of programs like ``before``.
        before: A trace of such a program.
        after: One that differs from it behind the blocks only.
        batch_size: As in ``chain_profile``, like what follows.
        card: Sizes the kernels' scratch memory.
        times_of: Says how long each station takes.
        tails: See ``LiveCurve.of``.
    """
    old, new = (
        _Measured.of(
            probe, LiveCurve.of(probe.trace, batch_size, card, tails=tails), times_of
        )
        for probe in (before, after)
    )
    last = chain.blocks[-1]
    one, other = old.rows[last.name], new.rows[last.name]
    saved = max(0, last.keep.saved_bytes + other.saved - one.saved)
    alive = other.saved + other.backward - one.saved - one.backward
    option = BlockOption(
        mode="keep",
        saved_bytes=saved,
        forward_bytes=last.keep.forward_bytes + other.forward - one.forward,
        backward_bytes=last.keep.saved_bytes + last.keep.backward_bytes + alive - saved,
        cached_bytes=max(0, last.keep.cached_bytes + other.cached - one.cached),
    )
    (forward_ns, backward_ns), (new_forward_ns, new_backward_ns) = (
        each.times[last.name] for each in (old, new)
    )
    changed = replace(
        last,
        options=(option,),
        gradient_bytes=max(0, last.gradient_bytes + other.gradient - one.gradient),
        forward_ns=max(0, last.forward_ns + new_forward_ns - forward_ns),
        backward_ns=max(0, last.backward_ns + new_backward_ns - backward_ns),
    )
    return replace(
        chain,
        static_bytes=max(chain.static_bytes, new.static),
        blocks=(*chain.blocks[:-1], changed),
    )


def block_types(kept: StepTrace) -> dict[str, int]:
    """Return a number for each block: equal for blocks that run the same ops.

    The same ops on the same sizes in the forward of the last traced micro-batch.
    """
    step, micro_step = steady_moment(kept)
    ops = kept.ops
    types: dict[tuple[bytes, ...], int] = {}
    found = {}
    for row in kept.passes:
        if (row.direction, row.step, row.micro_step) != ("forward", step, micro_step):
            continue
        first, last = ops.event.searchsorted([row.start, row.end], side="right")
        columns = (ops.name, ops.rate, ops.flops_per_sample, ops.bytes_per_sample)
        alike = (
            *(column[first:last].tobytes() for column in columns),
            ops.flops_fixed[first:last].tobytes(),
            ops.bytes_fixed[first:last].tobytes(),
        )
        found[kept.block_names[row.block]] = types.setdefault(alike, len(types))
    return found


def _recompute(
    station: Station, plain: _Measured, again: _Measured | None
) -> tuple[BlockOption, ...]:
    """Return the option to run the block again, if it was tried."""
    if station.block < 0 or again is None or station.name not in again.rows:
        return ()
    extra_ns = sum(again.times[station.name]) - sum(plain.times[station.name])
    return (_option("recompute", again.rows[station.name], max(0, extra_ns)),)


class _Change(NamedTuple):
    """What an option changes on a block against keeping or recomputing it."""

    segment: Segment
    saved: int
    cached: int
    forward: int
    alive: int  # S + b
    extra_ns: int

    def base(self, plain: _Measured, again: _Measured) -> _Measured:
        """Return what it is compared with: what is offloaded was kept."""
        return plain if self.segment.mode == "offload" else again

    def on(
        self, name: str, plain: _Measured, again: _Measured | None
    ) -> BlockOption | None:
        """Return the option for another block of the same type."""
        if again is None or name not in again.rows:
            return None
        base = self.base(plain, again)
        row = base.rows[name]
        saved = max(0, row.saved + self.saved)
        base_ns = sum(base.times[name]) - sum(plain.times[name])
        return BlockOption(
            mode=self.segment.mode,
            saved_ops=self.segment.saved_ops,
            input_on_host=self.segment.input_on_host,
            saved_bytes=saved,
            cached_bytes=max(0, row.cached + self.cached),
            forward_bytes=row.forward + self.forward,
            backward_bytes=row.saved + row.backward + self.alive - saved,
            extra_ns=max(0, base_ns + self.extra_ns),
        )


def _options_by_type(
    plain: _Measured,
    again: _Measured | None,
    others: Sequence[tuple[Probe, _Measured]],
    types: Mapping[str, int],
) -> dict[int, list[_Change]]:
    """Return what each tried option changes, once for each type of block."""
    found: dict[int, dict[tuple[object, ...], _Change]] = {}
    for probe, measured in others if again is not None else ():
        for segment in probe.segments:
            name = segment.blocks[0]
            is_plain = segment.mode == "recompute" and not segment.input_on_host
            if is_plain or name not in measured.rows or again is None:
                continue
            base = (plain if segment.mode == "offload" else again).rows[name]
            base_ns = (plain if segment.mode == "offload" else again).times[name]
            row = measured.rows[name]
            key = segment.mode, segment.saved_ops, segment.input_on_host
            found.setdefault(types.get(name, -1), {}).setdefault(
                key,
                _Change(
                    segment,
                    saved=row.saved - base.saved,
                    cached=row.cached - base.cached,
                    forward=row.forward - base.forward,
                    alive=row.saved + row.backward - base.saved - base.backward,
                    extra_ns=sum(measured.times[name]) - sum(base_ns),
                ),
            )
    return {kind: list(changes.values()) for kind, changes in found.items()}


def _option(mode: Mode, row: StationBytes, extra_ns: int) -> BlockOption:
    return BlockOption(
        mode=mode,
        saved_bytes=row.saved,
        forward_bytes=row.forward,
        backward_bytes=row.backward,
        cached_bytes=row.cached,
        extra_ns=extra_ns,
    )
