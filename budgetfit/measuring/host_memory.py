"""What the process takes of the host's memory, and of it page-locked."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")


def resident_bytes() -> int | None:
    """Return the host memory that this process holds now; None where nobody tells."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int | None:
    """Return the machine's memory that is free for programs; None where it is unknown.

    From Linux's ``MemAvailable``, which counts what caches would give back.
    """
    try:
        rows = _MEMINFO.read_text(encoding="ascii").splitlines()
        row = next(row for row in rows if row.startswith("MemAvailable:"))
        return int(row.split()[1]) * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def start_pinned_peak() -> None:
    """Begin a new peak of page-locked memory."""
    torch.cuda.reset_peak_host_memory_stats()


def pinned_peak_bytes() -> int | None:
    """Return the most page-locked memory in use since ``start_pinned_peak``.

    Of torch's caching host allocator, which keeps blocks whose sizes are powers of two.
    """
    return torch.cuda.host_memory_stats().get("allocated_bytes.peak")
