"""Read memory peaks: from CUDA's allocator, or from a counter of live bytes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Protocol

import torch

from budgetfit.measuring.host_memory import pinned_peak_bytes, start_pinned_peak
from budgetfit.measuring.process_memory import process_memory

if TYPE_CHECKING:
    from budgetfit.measuring.process_memory import ProcessMemory
    from budgetfit.measuring.protocols import LiveBytes


class Meter(Protocol):
    """Reads peaks; one for each kind of device."""

    process_bytes: int | None
    last_process: ProcessMemory | None
    notes: list[str]

    def start_phase(self) -> None:
        """Start a new peak."""

    def peaks(self) -> tuple[int, int] | None:
        """Return the peak allocated and reserved bytes since; None if unknown."""

    def finish_step(self) -> None:
        """Wait for the device and read what the process holds."""

    def pinned_bytes(self) -> int | None:
        """Return the most page-locked host memory since the start; None if unknown."""


class CudaMeter:
    """Reads the caching allocator's own counters."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.process_bytes: int | None = None
        self.last_process: ProcessMemory | None = None
        self.notes: list[str] = []
        gc.collect()
        torch.cuda.empty_cache()  # what earlier work cached is not this run's
        start_pinned_peak()

    def start_phase(self) -> None:
        """Start a new peak; the counters are the host's, nothing is waited for."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> tuple[int, int] | None:
        """Return the peak allocated and reserved bytes of the phase."""
        return (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
        )

    def finish_step(self) -> None:
        """Wait for the card and read what the process holds of it."""
        torch.cuda.synchronize(self.device)
        now = process_memory(self.device)
        self.last_process = (
            now  # kernels are loaded as steps use them: the last has all
        )
        self.process_bytes = max(self.process_bytes or 0, now.held_bytes)
        note = f"The process's memory was {now.source}."
        if note not in self.notes:
            self.notes.append(note)

    def pinned_bytes(self) -> int | None:
        """Return the peak of torch's own allocator of page-locked memory."""
        return pinned_peak_bytes()


class CpuMeter:
    """Reads a counter of live bytes, if there is one."""

    def __init__(self, counter: LiveBytes | None) -> None:
        self.counter = counter
        self.process_bytes: int | None = None
        self.last_process: ProcessMemory | None = None
        self.notes = ["VRAM was not checked: these steps ran on the CPU."]
        if counter is None:
            self.notes.append("Live bytes were not counted.")

    def start_phase(self) -> None:
        """Start a new peak."""
        if self.counter is not None:
            self.counter.reset_peak()

    def peaks(self) -> tuple[int, int] | None:
        """Return the peak of live bytes; a CPU reserves nothing."""
        return (self.counter.peak_bytes, -1) if self.counter is not None else None

    def finish_step(self) -> None:
        """Nothing to wait for."""

    def pinned_bytes(self) -> int | None:
        """Nothing is page-locked for a CPU."""
        return None
