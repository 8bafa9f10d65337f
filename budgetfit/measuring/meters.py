"""Memory meters: peaks from CUDA's caching allocator, or a live-bytes counter."""

import gc

import torch

from budgetfit.measuring.process_memory import ProcessMemory, process_memory
from budgetfit.measuring.protocols import LiveBytes


class Meter:
    """Reads memory peaks; this one knows none.

    Attributes:
        process_bytes: Peak device memory of this process; None if unknown.
        notes: Sources of the numbers, and what was not measured.
    """

    def __init__(self, *notes: str) -> None:
        self.process_bytes: int | None = None
        self.last_process: ProcessMemory | None = None
        self.notes = list(notes)

    def start_phase(self) -> None:
        """Start a new peak."""

    def peaks(self) -> tuple[int, int] | None:
        """Return the peak allocated and reserved bytes since; None if unknown."""
        return None

    def finish_step(self) -> None:
        """Synchronise the device and read the process's memory."""

    def pinned_bytes(self) -> int | None:
        """Return the peak of pinned host memory since the start; None if unknown."""
        return None


class CudaMeter(Meter):
    """Reads ``torch.cuda``'s memory statistics."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        gc.collect()
        torch.cuda.empty_cache()  # cached by earlier work
        torch.cuda.reset_peak_host_memory_stats()

    def start_phase(self) -> None:
        """Start a new peak, without synchronisation: the statistics are on the host."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> tuple[int, int] | None:
        """Return the peak allocated and reserved bytes of the phase."""
        return (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
        )

    def finish_step(self) -> None:
        """Synchronise and read the process's device memory."""
        torch.cuda.synchronize(self.device)
        now = process_memory(self.device)
        self.last_process = now  # kernels load lazily: the last reading has all
        self.process_bytes = max(self.process_bytes or 0, now.held_bytes)
        note = f"The process's memory was {now.source}."
        if note not in self.notes:
            self.notes.append(note)

    def pinned_bytes(self) -> int | None:
        """Return the peak of torch's caching host allocator, in powers of two."""
        return torch.cuda.host_memory_stats().get("allocated_bytes.peak")


class CpuMeter(Meter):
    """Reads a live-bytes counter, if there is one."""

    def __init__(self, counter: LiveBytes | None) -> None:
        super().__init__("VRAM was not checked: these steps ran on the CPU.")
        self.counter = counter
        if counter is None:
            self.notes.append("Live bytes were not counted.")

    def start_phase(self) -> None:
        """Start a new peak."""
        if self.counter is not None:
            self.counter.reset_peak()

    def peaks(self) -> tuple[int, int] | None:
        """Return the peak of live bytes, and -1 as nothing is reserved."""
        return (self.counter.peak_bytes, -1) if self.counter is not None else None
