"""MemoryTimeline: what a replay found, stretch by stretch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """The peaks within one stretch of a training step.

    Attributes:
        step: Optimizer step, from 0; -1 while model and optimizer are being made.
        micro_step: Micro-batch within the step, from 0.
        phase: ``setup``, ``forward``, ``backward`` or ``optimizer``.
        block: Module path of the block that runs, or "" between blocks.
        allocated_bytes: Peak of ``torch.cuda.memory_allocated`` in this stretch.
        reserved_bytes: Peak of ``torch.cuda.memory_reserved`` in this stretch.
    """

    step: int
    micro_step: int
    phase: str
    block: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """One replay of a trace through the caching allocator.

    Attributes:
        points: The stretches in order.
        allocated_bytes, reserved_bytes: Peaks over all of them.
        at_peak_bytes: Category -> bytes at the moment of the allocated peak; sums to
            it.
        at_peak_layers: The largest layers at that moment, as (module path, bytes);
            the path of what is made outside all of them is empty, and what is made
            behind the last block is ``logits and loss``, or ``loss`` outside of it.
        peak: Index into ``points`` of the allocated peak.
        retries: How often the allocator had to empty its cache to go on; a plan with
            retries is tight and slow (memory-model A4).
        failed_bytes: The request that did not fit, or None when everything did.
    """

    points: tuple[TimelinePoint, ...]
    allocated_bytes: int
    reserved_bytes: int
    at_peak_bytes: dict[str, int]
    at_peak_layers: tuple[tuple[str, int], ...] = field(default=())
    peak: int = 0
    retries: int = 0
    failed_bytes: int | None = None

    @property
    def phase_peaks_bytes(self) -> dict[str, int]:
        """Phase -> peak allocated bytes over all steps, ``setup`` left out."""
        peaks: dict[str, int] = {}
        for point in self.points:
            if point.phase != "setup":
                known = peaks.get(point.phase, 0)
                peaks[point.phase] = max(known, point.allocated_bytes)
        return peaks

    @property
    def floor_bytes(self) -> int:
        """What no batch size and no segments change: setup and optimizer step."""
        fixed = [
            point.reserved_bytes if point.phase == "setup" else point.allocated_bytes
            for point in self.points
            if point.phase in {"setup", "optimizer"}
        ]
        return max(fixed, default=0)
