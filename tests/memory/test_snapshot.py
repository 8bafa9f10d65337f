"""A replay as a memory snapshot: what PyTorch's own tools read, with our numbers."""

import itertools
import pickle
import pickletools
from typing import Any

import pytest
from torch.cuda import _memory_viz

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import replay
from budgetfit.memory.snapshot import step_snapshot
from tests.traced import ADA, line

GPU = find_gpu(ADA)
STEP = 2
SETTINGS = [AllocatorSettings(), AllocatorSettings(expandable_segments=True)]


def snapshot(settings: AllocatorSettings) -> dict[str, Any]:
    return step_snapshot(line("gpt2"), 3, GPU, step=STEP, settings=settings)


def blocks(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for each in found["segments"] for block in each["blocks"]]


def live_bytes(found: dict[str, Any]) -> list[int]:
    """Bytes before each event, and after the last: found from the end, backwards."""
    (events,) = found["device_traces"]
    change = {"alloc": 1, "free_completed": -1}
    sizes = [change.get(each["action"], 0) * each["size"] for each in events]
    end = sum(b["size"] for b in blocks(found) if b["state"] == "active_allocated")
    return list(itertools.accumulate(sizes, initial=end - sum(sizes)))


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_has_the_peaks_of_the_replay(settings: AllocatorSettings) -> None:
    found = snapshot(settings)
    points = replay(line("gpt2"), 3, GPU, settings=settings).points
    step = [point for point in points if point.step == STEP]
    assert max(live_bytes(found)) == max(point.allocated_bytes for point in step)
    reserved = sum(each["total_size"] for each in found["segments"])
    assert reserved == step[-1].reserved_bytes


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_block_is_in_its_segment_and_freed_once(
    settings: AllocatorSettings,
) -> None:
    found = snapshot(settings)
    for segment in found["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
    ends = [each["address"] + each["total_size"] for each in found["segments"]]
    starts = [each["address"] for each in found["segments"]]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    # Backwards from the end every free brings a block and every alloc takes one.
    alive = {b["address"] for b in blocks(found) if b["state"] == "active_allocated"}
    for event in reversed(found["device_traces"][0]):
        if event["action"] == "free_completed":
            assert event["addr"] not in alive
            alive.add(event["addr"])
        elif event["action"] == "alloc":
            alive.remove(event["addr"])
    assert min(live_bytes(found)) > 0


def test_a_growing_cache_is_seen() -> None:
    first = step_snapshot(line("gpt2"), 3, GPU, step=0)
    (events,) = first["device_traces"]
    grown = 0
    for event, following in itertools.pairwise(events):
        if event["action"] == "segment_alloc":
            grown += event["size"]
            assert following["action"] == "alloc"
            assert event["addr"] <= following["addr"] < event["addr"] + event["size"]
    assert 0 < grown <= sum(each["total_size"] for each in first["segments"])


def test_pytorch_reads_it() -> None:
    found = snapshot(SETTINGS[0])
    (events,) = found["device_traces"]
    assert f"{len(events)} entries" in _memory_viz.trace(found)
    assert "<script" in _memory_viz.trace_plot(found)
    assert "<script" in _memory_viz.segment_plot(found)


def test_its_pickle_has_only_what_memory_viz_unpickles() -> None:
    """The cases of ``unpickle`` in torch/utils/viz/MemoryViz.js of PyTorch."""
    known = {
        *("APPEND", "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT"),
        *("BINUNICODE", "DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME"),
        *("LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "PROTO"),
        *("SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE1", "TUPLE2"),
        *("TUPLE3", "BINFLOAT"),
    }
    written = pickle.dumps(snapshot(SETTINGS[0]), protocol=4)
    assert {op.name for op, _, _ in pickletools.genops(written)} <= known
