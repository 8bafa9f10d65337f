"""Live bytes after each event of a trace, at one batch size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.allocator_settings import DEFAULT_SETTINGS
from budgetfit.core.step_trace import StepTrace
from budgetfit.memory.replay import block_bytes, storage_bytes
from budgetfit.memory.simulated_allocator import rounded_bytes

if TYPE_CHECKING:
    from budgetfit.core.allocator_settings import AllocatorSettings
    from budgetfit.core.step_trace import Phase
    from budgetfit.memory.scratch_sizes.rules import DeviceProperties

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """Live bytes of a trace at one batch size.

    Attributes:
        trace: The trace.
        batch_size: Samples per micro-batch.
        sizes: Bytes of each storage.
        after: ``after[i]``: bytes alive after ``i`` events.
        alloc_event: Event that allocates each storage.
        free_event: Event that frees each storage; ``NEVER`` if none does.
    """

    trace: StepTrace
    batch_size: int
    sizes: NDArray[np.int64]
    after: NDArray[np.int64]
    alloc_event: NDArray[np.int64]
    free_event: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        trace: StepTrace,
        batch_size: int,
        device: DeviceProperties,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        *,
        exact_blocks: bool = True,
    ) -> LiveBytes:
        """Scale the trace to ``batch_size`` and add up its live bytes.

        Without ``exact_blocks`` sizes are only rounded. That is 20 times as fast, and
        up to 1.5 % too low where tensors are of a few MiB, because the allocator does
        not split small remainders off.
        """
        if exact_blocks:
            sizes = block_bytes(trace, batch_size, device, settings)
        else:
            requests = storage_bytes(trace, batch_size, device)
            sizes = rounded_bytes(requests, settings)
        life = _lifetimes(trace)
        after = np.concatenate([[0], np.cumsum(life.signs * sizes[life.storage])])
        return cls(trace, batch_size, sizes, after, life.alloc_event, life.free_event)

    def peak(self, start: int, end: int) -> int:
        """Return the most bytes alive from event ``start`` up to ``end``."""
        return int(self.after[start : end + 1].max())

    def phase(self, name: str, step: int, micro_step: int) -> Phase:
        """Return a phase of the trace."""
        return next(
            row
            for row in self.trace.phases
            if (row.name, row.step, row.micro_step) == (name, step, micro_step)
        )

    def after_of(self, which: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return ``after`` for the selected storages only."""
        life = _lifetimes(self.trace)
        sizes = np.where(which, self.sizes, 0)
        return np.concatenate([[0], np.cumsum(life.signs * sizes[life.storage])])


class _Lifetimes(NamedTuple):
    """Storage and sign of each event, and the first and last event of each storage."""

    storage: NDArray[np.int64]
    signs: NDArray[np.int64]
    alloc_event: NDArray[np.int64]
    free_event: NDArray[np.int64]


@lru_cache(maxsize=16)
def _lifetimes(trace: StepTrace) -> _Lifetimes:
    events = trace.events.astype(np.int64)
    storage = np.abs(events) - 1
    allocs = np.full(trace.fixed_bytes.size, NEVER)
    frees = np.full(trace.fixed_bytes.size, NEVER)
    positions = np.arange(len(events))
    allocs[storage[events > 0]] = positions[events > 0]
    frees[storage[events < 0]] = positions[events < 0]
    return _Lifetimes(storage, np.sign(events), allocs, frees)
