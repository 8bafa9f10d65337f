"""Record what PyTorch's allocator does under settings, each in a process of its own.

    python -m tests.memory.record_allocator_settings [NAME...]

Each row of ``COMBINATIONS`` becomes one file of ``fixtures/``, by
``record_allocator_fuzz.py`` on the null driver (``tests/accuracy/nulldriver``), on a
card so small that memory runs out.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

FIXTURES: Final = Path(__file__).parent / "fixtures"
MEMORY_GIB: Final = 3
COMBINATIONS: Final = {
    "expandable_split": "expandable_segments:True,max_split_size_mb:64",
    "expandable_roundup": "expandable_segments:True,roundup_power2_divisions:8",
    "expandable_large_segment": "expandable_segments:True,large_segment_size_mb:12",
    "expandable_fraction": "expandable_segments:True,per_process_memory_fraction:0.7",
    "expandable_collect": "expandable_segments:True,garbage_collection_threshold:0.5,"
    "per_process_memory_fraction:0.9",
    "roundup": "roundup_power2_divisions:4",
    "roundup_list": "roundup_power2_divisions:[1:8,4:0,64:4,>:2]",
    "roundup_one": "roundup_power2_divisions:1",
    "split_rounding": "max_split_size_mb:32,max_non_split_rounding_mb:96",
    "large_segment": "large_segment_size_mb:64",
    "large_segment_split": "large_segment_size_mb:24,max_split_size_mb:48",
    "fraction": "per_process_memory_fraction:0.6",
    "fraction_throw": "per_process_memory_fraction:0.6,throw_on_cudamalloc_oom:True",
    "throw": "throw_on_cudamalloc_oom:True,release_lock_on_cudamalloc:True",
    "expandable_throw": "expandable_segments:True,throw_on_cudamalloc_oom:True",
    "collect": "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
    "collect_alone": "garbage_collection_threshold:0.6",
    "collect_split": "garbage_collection_threshold:0.4,per_process_memory_fraction:0.8,"
    "max_split_size_mb:64",
    "all": "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9,"
    "max_split_size_mb:40,large_segment_size_mb:32,roundup_power2_divisions:[16:4,>:2]",
}


def record(name: str) -> None:
    """Write the recording of one combination."""
    command = [sys.executable, "-m", "tests.accuracy.nulldriver.run"]
    command += ["--gpu", "rtx-4090", "--memory-gib", str(MEMORY_GIB), "--", "python"]
    command += ["tests/memory/record_allocator_fuzz.py", "--operations", "1500"]
    command += ["--streams", "2", "--out", str(FIXTURES / f"allocator_{name}.json.gz")]
    kept = {key: text for key, text in os.environ.items() if "ALLOC_CONF" not in key}
    subprocess.run(
        command,
        env={**kept, "PYTORCH_CUDA_ALLOC_CONF": COMBINATIONS[name]},
        check=True,
        stderr=subprocess.DEVNULL,  # a warning for each time that memory runs out
    )


if __name__ == "__main__":
    for each in sys.argv[1:] or COMBINATIONS:
        record(each)
        sys.stdout.write(f"{each}\n")
