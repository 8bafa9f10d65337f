"""A replay as a memory snapshot, as ``torch.cuda.memory._snapshot`` returns one.

pytorch.org/memory_viz draws it. Fields as in torch 2.13 (``torch/cuda/memory.py``,
``_snapshot``); an event's frames say its layer and category instead of lines of code.
Addresses are simulated; only their order is that of a real run.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from budgetfit.core.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from budgetfit.core.step_trace import CATEGORIES, EMPTY_CACHE, StepTrace
from budgetfit.gpus.table import Gpu
from budgetfit.memory.caching_allocator import MappedBlock
from budgetfit.memory.replay import EventReplay, unlimited_replay

Snapshot = dict[str, Any]
_FIRST_ADDRESS: Final = 1 << 40  # no address is 0
_FREED: Final = "free_completed"
_SMALL_SEGMENT_BYTES: Final = 2 << 20


def step_snapshot(  # noqa: PLR0913 - a trace, a GPU and the settings of a run
    trace: StepTrace,
    batch_size: int,
    gpu: Gpu,
    *,
    step: int,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    micro_steps: int = 1,
) -> Snapshot:
    """Return the snapshot at the end of a step, with the events of that step.

    ``step`` is one of the timeline of ``replay``, whose other arguments are the same.
    """
    replay = unlimited_replay(
        trace, batch_size, gpu, settings=settings, micro_steps=micro_steps
    )
    record = _Record(trace, replay)
    for part in replay.parts:
        events = replay.events[part.event_range.start : part.event_range.end]
        if part.event_range.step < step:
            replay.allocator.run(events, replay.sizes)
        elif part.event_range.step == step:
            for event in events:
                record.run(event)
    return {
        "segments": record.segments(),
        "device_traces": [record.events],
        "allocator_settings": {"PYTORCH_ALLOC_CONF": settings.text},
    }


@dataclass(slots=True)
class _Record:
    """Runs events one by one and writes down what PyTorch would."""

    trace: StepTrace
    replay: EventReplay
    events: list[dict[str, Any]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)  # of segments, by address
    frames: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def run(self, event: int) -> None:
        """Run an event."""
        allocator, storage = self.replay.allocator, abs(event)
        if not self.sizes:
            self.sizes = _segment_sizes(allocator.blocks())
        block, reserved = allocator.block_of(storage), allocator.reserved_bytes
        allocator.run([event], self.replay.sizes)
        if allocator.reserved_bytes != reserved:
            self._segments_changed()
        if event > 0:
            block = allocator.block_of(storage)
        if block is not None and event != EMPTY_CACHE:
            for action in ("alloc",) if event > 0 else ("free_requested", _FREED):
                self._add(action, *block, self._frames(storage))

    def segments(self) -> list[dict[str, Any]]:
        """Return all segments with their blocks, as they are now."""
        found: list[dict[str, Any]] = []
        for block in self.replay.allocator.blocks():
            if block.starts_segment:
                found.append(_segment(block))
            last, used = found[-1], block.storage > 0
            last["blocks"].append(
                {
                    "address": _FIRST_ADDRESS + block.address,
                    "size": block.size_bytes,
                    "requested_size": block.size_bytes,
                    "state": "active_allocated" if used else "inactive",
                    "frames": self._frames(block.storage) if used else [],
                }
            )
            last["total_size"] += block.size_bytes
            if used:
                for name in ("allocated_size", "active_size", "requested_size"):
                    last[name] += block.size_bytes
        for each in found:
            small = each["total_size"] <= _SMALL_SEGMENT_BYTES
            each["segment_type"] = "small" if small else "large"
        return found

    def _segments_changed(self) -> None:
        before, self.sizes = self.sizes, _segment_sizes(self.replay.allocator.blocks())
        for address, size in before.items():
            if self.sizes.get(address) != size:
                self._add("segment_free", address, size, [])
        for address, size in self.sizes.items():
            if before.get(address) != size:
                self._add("segment_alloc", address, size, [])

    def _add(
        self, action: str, address: int, size: int, frames: list[dict[str, Any]]
    ) -> None:
        self.events.append(
            {
                "action": action,
                "addr": _FIRST_ADDRESS + address,
                "size": size,
                "stream": 0,
                "frames": frames,
            }
        )

    def _frames(self, storage: int) -> list[dict[str, Any]]:
        """Return the layer and the category of a storage as a stack of one frame."""
        row = storage - 1
        if row not in self.frames:
            layer = int(self.trace.layer[row])
            self.frames[row] = [
                {
                    "filename": self.trace.layers[layer] if layer >= 0 else "model",
                    "line": 0,
                    "name": CATEGORIES[self.trace.category[row]],
                }
            ]
        return self.frames[row]


def _segment(block: MappedBlock) -> dict[str, Any]:
    """Return a segment without blocks."""
    return {
        "device": 0,
        "address": _FIRST_ADDRESS + block.address,
        "total_size": 0,
        "stream": 0,
        "segment_type": "",
        "segment_pool_id": (0, 0),
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "frames": [],
        "blocks": [],
    }


def _segment_sizes(blocks: list[MappedBlock]) -> dict[int, int]:
    """Return the sizes of the segments by address."""
    sizes: dict[int, int] = {}
    start = 0
    for block in blocks:
        if block.starts_segment:
            start = block.address
        sizes[start] = sizes.get(start, 0) + block.size_bytes
    return sizes
