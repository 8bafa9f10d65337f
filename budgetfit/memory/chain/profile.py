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

from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.memory.chain.live_bytes import LiveCurve
from budgetfit.memory.chain.measured_trace import Measured, Probe
from budgetfit.memory.chain.option_costs import changes_by_type
from budgetfit.memory.chain.stage_bytes import worst
from budgetfit.memory.chain.stages import steady_moment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from budgetfit.core.block_profile import Mode
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.memory.chain.measured_trace import TimesOf
    from budgetfit.memory.chain.option_costs import OptionChange
    from budgetfit.memory.chain.stage_bytes import StationBytes
    from budgetfit.memory.chain.stages import Station
    from budgetfit.memory.kernel_rules.workspaces import KernelCard


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

    def measured(probe: Probe) -> Measured:
        curve = LiveCurve.of(
            probe.trace,
            batch_size,
            card,
            expandable_segments=expandable_segments,
            tails=tails,
        )
        return Measured.of(probe, curve, times_of)

    types = types or {}
    plain = measured(Probe(kept, ()))
    again = None if recomputed is None else measured(recomputed)
    tried = [(probe, measured(probe)) for probe in probes]
    everything = [plain, *([again] if again else []), *(each for _, each in tried)]
    rows = plain.rows | _worst_outside_blocks(plain.chain, everything)
    changes = changes_by_type(plain, again, tried, types) if again else {}

    def block(station: Station) -> BlockProfile:
        allowed = changes.get(types.get(station.name, -1), ())
        return _block_profile(station, rows[station.name], plain, again, allowed)

    static = max(each.static for each in everything)
    gradients = sum(row.gradient for row in rows.values())
    return ChainProfile(
        batch_size=batch_size,
        static_bytes=static,
        input_bytes=0,
        optimizer_bytes=max(0, plain.optimizer_peak - static - gradients),
        optimizer_ns=optimizer_ns,
        blocks=tuple(block(station) for station in plain.chain),
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
        Measured.of(
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


def _worst_outside_blocks(
    chain: Sequence[Station], everything: Sequence[Measured]
) -> dict[str, StationBytes]:
    """Return the most that a station between blocks costs, where all traces have it."""
    return {
        station.name: worst([each.rows[station.name] for each in everything])
        for station in chain
        if station.block < 0 and all(station.name in each.rows for each in everything)
    }


def _block_profile(
    station: Station,
    kept: StationBytes,
    plain: Measured,
    again: Measured | None,
    changes: Sequence[OptionChange],
) -> BlockProfile:
    """Return what a station costs kept, recomputed, and with its type's options."""
    name = station.name
    others = [change.on(name, plain, again) for change in changes if again is not None]
    forward_ns, backward_ns = plain.times[name]
    return BlockProfile(
        name=name,
        options=(
            _option("keep", kept, 0),
            *_recompute(station, plain, again),
            *(option for option in others if option is not None),
        ),
        gradient_bytes=kept.gradient,
        output_bytes=station.output_bytes,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        joins_next=station.joins_next,
    )


def _recompute(
    station: Station, plain: Measured, again: Measured | None
) -> tuple[BlockOption, ...]:
    """Return the option to run the block again, if it was tried."""
    if station.block < 0 or again is None or station.name not in again.rows:
        return ()
    extra_ns = sum(again.times[station.name]) - sum(plain.times[station.name])
    return (_option("recompute", again.rows[station.name], max(0, extra_ns)),)


def _option(mode: Mode, row: StationBytes, extra_ns: int) -> BlockOption:
    return BlockOption(
        mode=mode,
        saved_bytes=row.saved,
        forward_bytes=row.forward,
        backward_bytes=row.backward,
        cached_bytes=row.cached,
        extra_ns=extra_ns,
    )
