"""The complete sequence of allocator calls of a run, for replays and for debugging.

Format: ``data`` holds the calls in order since before the first allocation: ``n > 0``
allocates n bytes as requested, ``-k`` frees the k-th allocation, counted from 1.
``segments`` holds ``[position in data, bytes taken from (+) or given back to (-) the
device]``; ``streams`` maps the number of an allocation to its side stream if it has
one; ``marks`` says at which position each phase ends.
"""

from typing import Any, Final

import torch

MAX_EVENTS: Final = 50_000_000


class EventList:
    """Collects every allocator event of the process; start it before the first."""

    def __init__(self) -> None:
        if torch.cuda.memory_reserved() != 0:
            msg = "start recording events before the first CUDA allocation"
            raise RuntimeError(msg)
        self._data: list[int] = []
        self._segments: list[list[int]] = []
        self._streams: dict[int, int] = {}
        self._marks: list[dict[str, Any]] = []
        self._number_at: dict[int, int] = {}  # address -> number of the allocation
        self._stream_ids: list[int] = [0]
        self._allocation_count = 0
        self._restart()

    def collect(self, mark: dict[str, Any]) -> None:
        """Take over the events since the last call; a phase ended here."""
        for event in torch.cuda.memory._snapshot()["device_traces"][0]:
            self._add(event)
        self._marks.append({"at": len(self._data), **mark})
        self._restart()

    def as_dict(self) -> dict[str, Any]:
        """The list as JSON values."""
        return {
            "data": self._data,
            "segments": self._segments,
            "streams": self._streams,
            "marks": self._marks,
        }

    def _restart(self) -> None:
        torch.cuda.memory._record_memory_history(
            max_entries=MAX_EVENTS, context=None, clear_history=True
        )

    def _add(self, event: dict[str, Any]) -> None:
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "alloc":
            self._allocation_count += 1
            self._number_at[address] = self._allocation_count
            self._data.append(size)
            if event["stream"] != 0:
                if event["stream"] not in self._stream_ids:
                    self._stream_ids.append(event["stream"])
                side = self._stream_ids.index(event["stream"])
                self._streams[self._allocation_count] = side
        elif action == "free_completed":
            self._data.append(-self._number_at.pop(address))
        elif action in ("segment_alloc", "segment_map"):
            self._segments.append([len(self._data), size])
        elif action in ("segment_free", "segment_unmap"):
            self._segments.append([len(self._data), -size])
