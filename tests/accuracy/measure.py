"""Run one case in this process and write what it took.

A process measures one case, because a recording starts with an empty allocator.
``record.py`` starts this file; it is not meant to be typed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.accuracy.case import Case
from tests.accuracy.cases import case_named, recording_path
from tests.accuracy.event_list import EventList
from tests.accuracy.nvml import open_nvml
from tests.accuracy.provenance import (
    answer_for_the_device,
    choose_cudnn,
    describe_card,
    describe_software,
    origin,
    refuse_a_wrong_card,
    weights_as_they_are,
)
from tests.accuracy.training import Training, allowed_attention
from tests.accuracy.well_formed import FORMAT, GPU, NULL_DRIVER, faults, phases_of


class Recorder:
    """The memory numbers of named phases, and on request every allocator event."""

    def __init__(self, *, with_events: bool) -> None:
        torch.cuda.init()
        self.setup: list[dict[str, Any]] = []
        self.steps: list[list[dict[str, Any]]] = []
        self.events = EventList() if with_events else None
        self.nvml = open_nvml() if origin() == GPU else None
        torch.cuda.synchronize()  # creates the context: nothing of ours is on it yet
        self.process_bytes_at_start = self._process_bytes()

    def _process_bytes(self) -> int | None:
        return None if self.nvml is None else self.nvml.process_bytes()

    def start_step(self) -> None:
        """The phases that follow belong to a new step."""
        self.steps.append([])

    @contextmanager
    def phase(self, name: str, micro_step: int = 0) -> Iterator[None]:
        """Measure the block under ``with``."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        where = {"phase": name, "micro_step": micro_step}
        (self.steps[-1] if self.steps else self.setup).append(
            {
                **where,
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
                "end_allocated_bytes": torch.cuda.memory_allocated(),
                "end_reserved_bytes": torch.cuda.memory_reserved(),
                "process_bytes": self._process_bytes(),
            }
        )
        if self.events is not None:
            self.events.collect({"step": len(self.steps) - 1, **where})


def notes_before(case: Case) -> list[str]:
    """What a reader must know of this recording; prepares the null driver for it."""
    if origin() == GPU:
        return []
    notes = ["made without a GPU, by the null driver: not a GPU measurement"]
    # Compiled, transformers cannot ask, and builds a mask.
    if case.model.config and case.compile != "model":
        notes.append(answer_for_the_device())
    if case.model.note:
        notes.append(case.model.note)
    return notes


def notes_after(training: Training) -> list[str]:
    """What happened on the way: a scaler that skipped steps created no states."""
    scaler = training.scaler
    if origin() == NULL_DRIVER or not scaler.is_enabled():
        return []
    return [f"the GradScaler ended with a scale of {scaler.get_scale():.0f}"]


def measure(case: Case, *, with_events: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recording of a case, and its event list (empty unless asked for)."""
    refuse_a_wrong_card(case)
    notes = notes_before(case)
    if case.runs_out and origin() == GPU:
        total = torch.cuda.get_device_properties(0).total_memory
        limit = case.imitated_memory_gib * 2**30
        torch.cuda.set_per_process_memory_fraction(limit / total)
    recorder = Recorder(with_events=with_events)
    with recorder.phase("setup"), weights_as_they_are():
        training = Training(case)
    with allowed_attention(case):  # in the recomputation too
        if case.compile:
            with recorder.phase("compile"):
                training.compile()
        for batch_size in case.batch_sizes:
            recorder.start_step()
            training.step(recorder.phase, batch_size)
    weights = list(training.model.parameters())
    config = getattr(training.model, "config", None)
    recording = {
        "format": FORMAT,
        "name": case.name,
        "origin": origin(),
        "date": datetime.now(UTC).date().isoformat(),
        "card": describe_card(recorder.nvml),
        "software": describe_software(),
        "case": case.as_dict(),
        "parameter_count": sum(weight.numel() for weight in weights),
        "parameter_bytes": sum(weight.nbytes for weight in weights),
        "attention": getattr(config, "_attn_implementation", None),
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "process_bytes_at_start": recorder.process_bytes_at_start,
        "setup": recorder.setup,
        "steps": recorder.steps,
        "notes": notes + notes_after(training),
    }
    return recording, recorder.events.as_dict() if recorder.events else {}


def write(recording: dict[str, Any], path: Path, events: dict[str, Any]) -> None:
    """Write a recording, indented, or one with events, on one line.

    Raises:
        ValueError: When the recording is not what a recording must be.
    """
    if wrong := faults(recording):
        msg = f"{recording['name']} is not written: {'; '.join(wrong)}"
        raise ValueError(msg)
    path.parent.mkdir(parents=True, exist_ok=True)
    if events:
        text = json.dumps({**recording, "events": events}, separators=(",", ":"))
    else:
        text = json.dumps(recording, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> int:
    """Measure the case named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--cudnn", choices=("on", "off"), default="off")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--events", type=Path)
    options = parser.parse_args()
    choose_cudnn(enabled=options.cudnn == "on")
    case = case_named(options.name)
    recording, events = measure(case, with_events=options.events is not None)
    path = recording_path(recording, options.out)
    write(recording, path, {})
    if options.events is not None:
        write(recording, options.events / path.name, events)
    allocated, reserved = (
        max(phase[f"peak_{footprint}_bytes"] for phase in phases_of(recording))
        for footprint in ("allocated", "reserved")
    )
    sys.stdout.write(
        f"{case.name}: {recording['origin']}, peak allocated {allocated:,}, "
        f"reserved {reserved:,} bytes\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
