"""TraceCache: traces on disk.

A key hashes everything that a trace depends on, so entries never become stale. Files
are plain arrays and JSON (``npz`` without pickle).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.traces.cache.file import read_trace, write_trace
from budgetfit.traces.cache.folder import CacheFolder

if TYPE_CHECKING:
    from budgetfit.core.step_trace import StepTrace


class TraceCache(CacheFolder):
    """The traces of the cache's folder."""

    suffix = ".npz"

    def load(self, key: str | None) -> StepTrace | None:
        """Return the trace stored under ``key``; None if there is none."""
        found: StepTrace | None = self.read(key, read_trace)
        return found

    def store(self, key: str | None, trace: StepTrace) -> None:
        """Store ``trace`` under ``key``, if possible."""
        self.write(key, lambda file, key: write_trace(file, key, trace))
