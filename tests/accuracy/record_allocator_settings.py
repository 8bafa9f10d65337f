"""Record programs under allocator settings, each in a process of its own.

    python -m tests.accuracy.record_allocator_settings [PROGRAM...]  # the null driver

Six of the recorded cases run under each of ``COMBINATIONS``;
``allocator_settings.json`` then has their peaks over all steps. Where garbage is
collected the imitated card has ``ROOM`` times what the program reserves without
settings: on a card with more memory there is nothing to collect.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.accuracy.case import STEPS, Case
from tests.accuracy.cases import case_named
from tests.accuracy.measure import measure
from tests.accuracy.provenance import choose_cudnn

RECORDED: Final = Path(__file__).with_name("allocator_settings.json")
PROGRAMS: Final = (
    "gpt2-124m-bf16-mixed-keep-b8-then-b3-rtx-4090",
    "bert-base-fp16-mixed-recompute-b16-then-b5-t4",
    "t5-base-bf16-mixed-keep-b16-then-b7-a10g",
    "llama-1.1b-s1024-bf16-mixed-recompute-b2-rtx-4090",
    "vit-base-bf16-mixed-keep-b64-rtx-4090",
    "resnet-50-bf16-mixed-keep-b64-rtx-4090",
)
COMBINATIONS: Final = (
    "expandable_segments:True",
    "expandable_segments:True,roundup_power2_divisions:8",
    "expandable_segments:True,large_segment_size_mb:64",
    "expandable_segments:True,max_split_size_mb:128",
    "max_split_size_mb:32",
    "max_split_size_mb:64,max_non_split_rounding_mb:128",
    "max_split_size_mb:256,roundup_power2_divisions:16",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[16:8,64:2,256:4,>:1]",
    "large_segment_size_mb:64",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.95",
    (
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.98,"
        "max_split_size_mb:64,roundup_power2_divisions:8"
    ),
)
ROOM: Final = 1.3
MIB: Final = 1 << 20


class SettledCase(Case):
    """A case whose smaller batch comes after as many full steps as a replay plays."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples per micro-batch in every recorded step."""
        if not self.last_batch_size:
            return super().batch_sizes
        return (*(self.batch_size,) * STEPS, self.last_batch_size, self.batch_size)


def measure_here(program: str) -> dict[str, int]:
    """Run a program in this process, which has the card and the settings."""
    choose_cudnn(enabled=False)
    case = SettledCase(**vars(case_named(program)))
    recording, _ = measure(case, with_events=False)
    phases = [phase for step in recording["steps"] for phase in step]
    return {
        "allocated": max(phase["peak_allocated_bytes"] for phase in phases),
        "reserved": max(phase["peak_reserved_bytes"] for phase in phases),
        "retries": recording["alloc_retries"],
    }


def record_one(program: str, settings: str, memory_bytes: int) -> dict[str, int]:
    """Run a program on the null driver, in a process of its own."""
    command = [sys.executable, "-m", "tests.accuracy.nulldriver.run"]
    command += ["--gpu", case_named(program).gpu]
    if memory_bytes:
        command += ["--memory-gib", str(memory_bytes / 2**30)]
    command += ["--", "python", "-m", "tests.accuracy.record_allocator_settings"]
    command += ["--measure", program]
    kept = {key: text for key, text in os.environ.items() if "ALLOC_CONF" not in key}
    done = subprocess.run(
        command,
        env={**kept, "PYTORCH_CUDA_ALLOC_CONF": settings},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout.strip():
        raise RuntimeError(f"{program} with {settings}: {done.stderr[-2000:]}")
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found | {"memory": memory_bytes}


def record(programs: Sequence[str]) -> None:
    """Record programs under all settings and write them to the file."""
    rows: dict[str, dict[str, dict[str, int]]] = {each: {} for each in PROGRAMS}
    if RECORDED.is_file():
        rows |= json.loads(RECORDED.read_text("utf-8"))
    for program in programs:
        rows[program] = {"": record_one(program, "", 0)}
        room = int(rows[program][""]["reserved"] * ROOM) // MIB * MIB
        for settings in COMBINATIONS:
            memory = room if "garbage" in settings else 0
            rows[program][settings] = record_one(program, settings, memory)
            sys.stdout.write(f"{program}: {settings}: {rows[program][settings]}\n")
            sys.stdout.flush()
        RECORDED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Record all, or measure one program in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", default=PROGRAMS, metavar="PROGRAM")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(f"{json.dumps(measure_here(options.measure))}\n")
    else:
        record(options.programs)


if __name__ == "__main__":
    main()
