"""One trace, measured: what each station of its chain costs, in bytes and in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from budgetfit.memory.chain.live_bytes import LiveCurve
from budgetfit.memory.chain.stage_bytes import StationBytes, station_bytes
from budgetfit.memory.chain.stages import Station, stations

if TYPE_CHECKING:
    from budgetfit.core.recipe import Segment
    from budgetfit.core.step_trace import StepTrace

PassTimes = tuple[int, int]  # nanoseconds of a station's forward and backward


class Probe(NamedTuple):
    """A trace in which blocks have options of their own: one block per segment."""

    trace: StepTrace
    segments: tuple[Segment, ...]


TimesOf = Callable[[Probe, Sequence[Station]], Sequence[PassTimes]]


@dataclass(frozen=True, eq=False)
class Measured:
    """One trace, measured: a row for each station, by name."""

    curve: LiveCurve
    chain: tuple[Station, ...]
    static: int
    rows: dict[str, StationBytes]
    times: dict[str, PassTimes]

    @classmethod
    def of(cls, probe: Probe, curve: LiveCurve, times_of: TimesOf | None) -> Measured:
        """Cut a probe's curve into stations and read off what each one costs."""
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
        """The most bytes alive in an optimizer step."""
        peaks = [
            self.curve.most(row.start, row.end)
            for row in self.curve.trace.phases
            if row.name == "optimizer"
        ]
        return max(peaks, default=0)
