"""The caching allocator against recordings of PyTorch's own."""

import gzip
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.memory.reference_allocator.allocator import (
    OutOfMemory,
    ReferenceAllocator,
)
from budgetfit.memory.reference_allocator.block_pool import Block
from tests.accuracy.nulldriver.addresses import null_driver_addresses
from tests.memory.record_allocator_settings import COMBINATIONS

RECORDINGS = sorted((Path(__file__).parent / "fixtures").glob("allocator_*.json.gz"))


def differences(allocator: ReferenceAllocator, sequence: dict[str, Any]) -> list[str]:
    """What the allocator answers otherwise than PyTorch did."""
    found = []
    blocks: list[Block | None] = [None]  # by number of the allocation, from 1
    failed = []
    for place, (operation, *recorded) in enumerate(
        zip(
            sequence["operations"],
            accumulate(sequence["allocated_bytes"]),
            accumulate(sequence["reserved_bytes"]),
            strict=True,
        )
    ):
        if operation > 0:
            number = len(blocks)
            blocks.append(None)
            try:
                blocks[number] = allocator.malloc(
                    operation, sequence["streams"][number - 1]
                )
            except OutOfMemory:
                failed.append(number)
        elif operation < 0:
            allocator.free(blocks[-operation])
        else:
            allocator.empty_cache()
        replayed = [allocator.allocated_bytes, allocator.reserved_bytes]
        if replayed != recorded:
            found.append(f"operation {place}: {recorded} recorded, {replayed} replayed")
    if failed != sequence["failed"]:
        found.append(f"out of memory: {sequence['failed']} recorded, {failed} replayed")
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "retries"):
        replayed_value = getattr(allocator, name)
        if replayed_value != sequence[name]:
            found += [f"{name}: {sequence[name]} recorded, {replayed_value} replayed"]
    return found


def read_recording(path: Path) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return recording


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split(".js")[0])
def test_every_byte_is_as_pytorch_recorded_it(path: Path) -> None:
    recording = read_recording(path)
    for sequence in recording["sequences"]:
        allocator = ReferenceAllocator(
            recording["device_bytes"], AllocatorSettings.parse(recording["settings"])
        )
        with null_driver_addresses():  # recorded there
            assert differences(allocator, sequence) == []


def test_the_recordings_reach_what_they_are_meant_to_check() -> None:
    recordings = [read_recording(path) for path in RECORDINGS]
    assert {recording["settings"] for recording in recordings} == {
        "",
        "expandable_segments:True",
        "max_split_size_mb:128",
        *COMBINATIONS.values(),
    }
    sequences = [each for recording in recordings for each in recording["sequences"]]
    assert sum(len(each["operations"]) for each in sequences) >= 20_000
    assert sum(len(each["failed"]) for each in sequences) >= 50
    assert sum(each["retries"] for each in sequences) > sum(
        len(each["failed"]) for each in sequences
    )
    assert max(max(each["streams"]) for each in sequences) == 2
