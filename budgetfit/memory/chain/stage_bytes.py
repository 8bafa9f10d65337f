"""What each station of the chain costs in one trace: the letters of rule C.

Read off the curve of live bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from budgetfit.memory.chain.stages import Station, steady_moment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.core.step_trace import Phase
    from budgetfit.memory.chain.live_bytes import LiveCurve


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
    # Gone before the backward begins: where alive at a station's end, it passes.
    passing = curve.after_of(in_forward & (curve.death < backward.start))
    # Still there behind it; ``after`` there counts what has come by each moment.
    lasting = (curve.birth >= backward.start) & (curve.death >= backward.end)
    grown = curve.after_of(lasting)
    prefix = cached = 0
    measured = []
    for station in chain:
        start, end = station.forward
        begin, stop = station.backward
        # Its output is not cached: it belongs to the station that takes it.
        new_cached = int(passing[end]) - _handed_on(curve, station, forward, backward)
        total = int(curve.after[end]) - static - station.output_bytes
        new_prefix = total - new_cached
        measured.append(
            StationBytes(
                saved=new_prefix - prefix,
                cached=new_cached - cached,
                forward=curve.most(start, end) - static - prefix - cached,
                backward=curve.most(begin, stop) - static - new_prefix
                if stop > begin
                else 0,
                gradient=int(grown[stop] - grown[begin]),
            )
        )
        prefix, cached = new_prefix, new_cached
    return static, _above_the_base(chain, measured)


def _handed_on(
    curve: LiveCurve, station: Station, forward: Phase, backward: Phase
) -> int:
    """Return the bytes of an output that later stations take and nothing saves."""
    output, end = station.output_storage, station.forward[1]
    if output < 0:
        return 0
    is_made_here = forward.start <= curve.birth[output] < end
    is_gone_before_the_backward = end <= curve.death[output] < backward.start
    passes = is_made_here and is_gone_before_the_backward
    return station.output_bytes if passes else 0


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


def worst(rows: Sequence[StationBytes]) -> StationBytes:
    """What cannot be wrapped may still cost more once something else is recomputed.

    An encoder's output, for one, lives on as the input of every recomputed decoder
    block and not at all where the decoder saves a low-precision copy. The largest value
    holds for every plan.
    """
    saved = max(row.saved for row in rows)
    return StationBytes(
        saved=saved,
        cached=max(row.saved + row.cached for row in rows) - saved,
        forward=max(row.forward for row in rows),
        backward=max(row.backward for row in rows),
        gradient=max(row.gradient for row in rows),
    )
