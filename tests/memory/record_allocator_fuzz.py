"""Record what PyTorch's own caching allocator does with random requests.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
        python tests/memory/record_allocator_fuzz.py --out recording.json.gz

Must run where ``torch.cuda`` works: on a real card, or on a null driver (PyTorch's
CUDA build without a GPU, whose host code runs and whose kernels do not), which also
offers devices small enough for out-of-memory errors. The settings are those of the
environment. Nothing of budgetfit is used; `test_reference_allocator_recordings.py`
replays the recordings. On a real card `device_bytes` is what was free at the start;
how much of the last MiB the driver can hand out is its own affair, so stay clear of
the limit there with `--largest-bytes`.

A recording is JSON, gzipped:

- `origin` ("gpu" or "null driver"), `device`, `torch`, `cuda`, `date`, `settings`
- `device_bytes`: how much the device can hold
- `sequences`, each from an empty cache:
    - `operations`: n > 0 allocates n bytes, -k frees allocation k (counted from 1, the
      failed ones too), 0 empties the cache
    - `streams`: number of the stream of each allocation
    - `failed`: the allocations that ran out of memory
    - `allocated_bytes`, `reserved_bytes`: after each operation, as the difference to
      the operation before
    - `peak_allocated_bytes`, `peak_reserved_bytes`, `retries`: at the end
"""

import argparse
import gzip
import json
import math
import os
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

GROWING_FREE_SHARE = 0.35  # until out of memory, or the most are live ...
MOST_LIVE = 300
SHRINKING_FREE_SHARE = 0.6  # ... and then until a quarter of those is gone
REPEATED_SHARE = 0.3  # of the sizes, as in training: ties decide by address
EMPTY_CACHE_SHARE = 0.002


class Recorder:
    """One sequence of random requests and what became of them."""

    def __init__(self, seed: int, streams: int, largest_bytes: int) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if torch.cuda.memory_reserved():
            raise RuntimeError("the sequence before left memory behind")
        self.random = random.Random(seed)
        self.streams = [torch.cuda.Stream() for _ in range(streams - 1)]
        self.largest_bytes = largest_bytes
        self.repeated_sizes = [self.random_size() for _ in range(8)]
        self.free_share = GROWING_FREE_SHARE
        self.fewest_live = 0
        self.live: dict[int, int] = {}  # address by number of the allocation
        self.operations: list[int] = []
        self.stream_numbers: list[int] = []
        self.failed: list[int] = []
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self.retries_before = retries()

    def random_size(self) -> int:
        largest_bytes = self.random.choice(
            [1 << 12, 1 << 20, 1 << 24, 1 << 28, *[self.largest_bytes] * 2]
        )
        return int(2 ** self.random.uniform(0, math.log2(largest_bytes)))

    def step(self) -> None:
        if len(self.live) >= MOST_LIVE:
            self.shrink()
        elif len(self.live) <= self.fewest_live:
            self.free_share = GROWING_FREE_SHARE
        if self.random.random() < EMPTY_CACHE_SHARE:
            torch.cuda.empty_cache()
            self.operations.append(0)
        elif self.live and self.random.random() < self.free_share:
            number = self.random.choice(list(self.live))
            torch.cuda.caching_allocator_delete(self.live.pop(number))
            self.operations.append(-number)
        else:
            self.allocate()
        self.allocated.append(torch.cuda.memory_allocated())
        self.reserved.append(torch.cuda.memory_reserved())

    def allocate(self) -> None:
        if self.random.random() < REPEATED_SHARE:
            size_bytes = self.random.choice(self.repeated_sizes)
        else:
            size_bytes = self.random_size()
        stream_number = self.random.randint(0, len(self.streams))
        stream = self.streams[stream_number - 1] if stream_number else None
        self.operations.append(size_bytes)
        self.stream_numbers.append(stream_number)
        number = len(self.stream_numbers)
        try:
            self.live[number] = torch.cuda.caching_allocator_alloc(
                size_bytes, stream=stream
            )
        except torch.OutOfMemoryError:
            self.failed.append(number)
            self.shrink()

    def shrink(self) -> None:
        self.free_share = SHRINKING_FREE_SHARE
        self.fewest_live = len(self.live) * 3 // 4

    def finish(self) -> dict[str, Any]:
        sequence = {
            "operations": self.operations,
            "streams": self.stream_numbers,
            "failed": self.failed,
            "allocated_bytes": differences(self.allocated),
            "reserved_bytes": differences(self.reserved),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "retries": retries() - self.retries_before,
        }
        for address in self.live.values():
            torch.cuda.caching_allocator_delete(address)
        return sequence


def retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def differences(values: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Record PyTorch's caching allocator.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--largest-bytes", type=int, help="default: half of the device")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    device = torch.cuda.get_device_name(0)
    device_bytes = torch.cuda.mem_get_info(0)[0]
    largest_bytes = options.largest_bytes or device_bytes // 2
    sequences = []
    for seed in range(options.seed, options.seed + options.sequences):
        recorder = Recorder(seed, options.streams, largest_bytes)
        for _ in range(options.operations):
            recorder.step()
        sequences.append(recorder.finish())
    recording = {
        "origin": "null driver" if "NullCUDA" in device else "gpu",
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.now(UTC).date().isoformat(),
        "settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "device_bytes": device_bytes,
        "sequences": sequences,
    }
    text = json.dumps(recording, separators=(",", ":"))
    options.out.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
