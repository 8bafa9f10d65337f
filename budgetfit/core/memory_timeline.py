"""MemoryTimeline: allocator peaks of a replay, per phase and block."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """The peaks within one block or phase of a training step.

    Attributes:
        step: Optimizer step, from 0; -1 during setup.
        micro_step: Micro-batch within the step, from 0.
        phase: ``setup``, ``forward``, ``backward`` or ``optimizer``.
        block: Module path of the running block, or "" between blocks.
        allocated_bytes: Peak of ``torch.cuda.memory_allocated``.
        reserved_bytes: Peak of ``torch.cuda.memory_reserved``.
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
        points: In order of time.
        allocated_bytes, reserved_bytes: Peaks over all points.
        at_peak_bytes: Category -> bytes at the moment of the allocated peak; sums to
            it.
        at_peak_layers: The largest layers at that moment, as (module path, bytes); the
            path is empty outside all modules, and ``logits and loss`` or ``loss``
            after the last block.
        peak: Index into ``points`` of the allocated peak.
        retries: ``num_alloc_retries`` in the steps: how often the allocator had to
            empty its cache; training with retries is slow.
        failed_bytes: The allocation that failed, or None.
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
        """Phase -> peak allocated bytes over all steps, without ``setup``."""
        peaks: dict[str, int] = {}
        for point in self.points:
            if point.phase != "setup":
                known = peaks.get(point.phase, 0)
                peaks[point.phase] = max(known, point.allocated_bytes)
        return peaks

    @property
    def loading_reserved_bytes(self) -> int:
        """Peak of reserved bytes before the first step."""
        loading = (each.reserved_bytes for each in self.points if each.step < 0)
        return max(loading, default=0)

    @property
    def floor_bytes(self) -> int:
        """Allocated peak of setup and optimizer step, whatever is recomputed."""
        # The batch stays on the card until the next one, and counts.
        fixed = [
            point.allocated_bytes
            for point in self.points
            if point.phase in {"setup", "optimizer"}
        ]
        return max(fixed, default=0)
