"""Step times of the accuracy cases, recorded on a card and predicted.

    python -m benchmarks.recorded_steps --record FILE [--seconds 1.2] NAME...
    python -m benchmarks.recorded_steps              # predicted; docs/times.md

A name is a case of ``tests/accuracy/cases.py`` or a pattern, of this card; ``@8`` after
it takes 8 samples instead, ``@8+tf32`` lets fp32 products run in TF32. Each line of
FILE is a step: the times of its phases and of steps one after the other, as a training
loop has them that reads no loss, and the kernels of one more step by op. The training
program is that of the memory recordings. Where it is recorded, nothing of budgetfit is
needed.
"""

import argparse
import dataclasses
import fnmatch
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from tests.accuracy.case import Case
from tests.accuracy.cases import CASES
from tests.accuracy.nvml import open_nvml
from tests.accuracy.provenance import (
    choose_cudnn,
    describe_card,
    describe_software,
    refuse_a_wrong_card,
)
from tests.accuracy.training import Training, allowed_attention

WARM_UP, FEWEST, MOST = 2, 3, 20  # steps
RECORDED: Final = Path(__file__).parent / "card_recordings" / "h100-steps.jsonl"
PAGE: Final = Path(__file__).parents[1] / "docs" / "times.md"
HEADING: Final = "## Recorded on an H100"
TEXT: Final = """\
{versions}, its host a virtual machine of 16 cores. Steps one after the other, without
copies of the batch from pageable memory. The H100's shares are from single ops (`python
-m benchmarks.kernel_times`, `benchmarks/card_recordings`); nothing was fitted on these
steps. Two of the compiled models are predicted with the attention that torch 2.11
compiled, plain products in fp32; torch 2.13, which plans ask for, compiles fused ones.
`python -m benchmarks.recorded_steps` writes this section."""


class Clock:
    """The phases of steps, in milliseconds between events on the card."""

    def __init__(self) -> None:
        self.phases: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str, micro_step: int = 0) -> Iterator[None]:  # noqa: ARG002
        """Time what is under ``with``, without waiting for it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.phases[name].append((begin, end))

    def milliseconds(self, steps: int) -> dict[str, float]:
        """Of a step, by phase: the mean over the steps."""
        return {
            name: round(sum(a.elapsed_time(b) for a, b in pairs) / steps, 4)
            for name, pairs in self.phases.items()
        }


def timed(training: Training, batch_size: int, seconds: float) -> dict[str, Any]:
    """Steps one after the other for about that long."""
    for _ in range(WARM_UP):
        training.step(Clock().phase, batch_size)
    torch.cuda.synchronize()
    started = time.perf_counter()
    training.step(Clock().phase, batch_size)
    torch.cuda.synchronize()
    once = time.perf_counter() - started
    steps = min(MOST, max(FEWEST, round(seconds / once)))
    clock, marks, host = Clock(), [torch.cuda.Event(enable_timing=True)], []
    marks[0].record()
    started = time.perf_counter()
    for _ in range(steps):
        before = time.perf_counter()
        training.step(clock.phase, batch_size)
        host.append(1e3 * (time.perf_counter() - before))
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    whole = 1e3 * (time.perf_counter() - started)
    between = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return {
        "steps": steps,
        "step_ms": round(whole / steps, 4),
        "median_ms": round(statistics.median(between), 4),
        "each_ms": [round(one, 3) for one in between],
        "host_ms": round(statistics.median(host), 4),
        "phases_ms": clock.milliseconds(steps),
        "once_ms": round(1e3 * once, 4),
    }


def kernels(training: Training, batch_size: int) -> dict[str, Any]:
    """The kernels of one step, by the op that launched them: count, microseconds."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        training.step(Clock().phase, batch_size)
        torch.cuda.synchronize()
    ops: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    for row in found.key_averages():
        took = row.self_device_time_total
        if not took or row.is_user_annotation:
            continue
        on_card = row.device_type == torch.autograd.DeviceType.CUDA
        (names if on_card else ops)[row.key[:120]] = [row.count, round(took, 1)]

    def longest(rows: dict[str, list[float]]) -> dict[str, list[float]]:
        order = sorted(rows.items(), key=lambda row: -row[1][1])
        return dict(order[:60])

    return {
        "kernel_count": sum(int(count) for count, _ in names.values()),
        "kernel_us": round(sum(took for _, took in names.values()), 1),
        "ops": longest(ops),
        "kernels": longest(names),
    }


def record(case: Case, seconds: float, *, tf32: bool, with_kernels: bool) -> Any:  # noqa: ANN401
    """Time one case; its model is made on the card, which changes no time."""
    refuse_a_wrong_card(case)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    training = Training(case, built_on="cuda")
    row: dict[str, Any] = {}
    with allowed_attention(case):
        if case.compile:
            started = time.perf_counter()
            training.compile()
            row["compile_s"] = round(time.perf_counter() - started, 2)
        row |= timed(training, case.batch_size, seconds)
        row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        if with_kernels:
            row |= kernels(training, case.batch_size)
    return row


def forget() -> None:
    """Leave the card as it was."""
    torch._dynamo.reset()  # noqa: SLF001
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def chosen(pattern: str) -> Iterator[tuple[str, Case, bool]]:
    """The cases of a pattern, with another batch size or TF32."""
    pattern, _, changes = pattern.partition("@")
    size, _, mark = changes.partition("+")
    for case in CASES.values():
        if fnmatch.fnmatchcase(case.name, pattern):
            changed = dataclasses.replace(case, batch_size=int(size)) if size else case
            yield f"{case.name}{'@' if changes else ''}{changes}", changed, bool(mark)


class Predicted(NamedTuple):
    """A recorded step and its prediction, in milliseconds.

    ``measured_ms`` is without the copies of the batch from pageable memory, which no
    prediction has.
    """

    name: str
    group: str
    measured_ms: float
    predicted_ms: float
    measured_kernels_ms: float
    predicted_kernels_ms: float
    inside: bool

    @property
    def error(self) -> float:
        """Signed: above zero means predicted too slow."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def kernel_error(self) -> float:
        """The same of what the kernels take on the card."""
        return self.predicted_kernels_ms / self.measured_kernels_ms - 1


def kernels_ms(row: dict[str, Any]) -> float:
    """What the kernels of a recorded step take, without copies of the batch.

    A range around the optimizer's kernels was recorded as if it were one more of them.
    """
    counted_us = sum(
        took
        for name, (_, took) in row["kernels"].items()
        if "HtoD" in name or name.startswith("Optimizer.step#")
    )
    return float(row["kernel_us"] - counted_us) / 1e3


def predicted(row: dict[str, Any]) -> Predicted:
    """Predict a recorded step."""
    from benchmarks.step_predictions import predict

    case = dataclasses.replace(CASES[row["case"]], batch_size=row["batch_size"])
    if case.compile and not any("attention" in name for name in row["ops"]):
        case = dataclasses.replace(case, attention="math")  # as torch 2.11 compiled it
    found = predict(case, tf32=row["tf32"])
    copies_ms = sum(us for name, (_, us) in row["kernels"].items() if "HtoD" in name)
    copies_ms /= 1e3
    measured_ms = row["median_ms"] - copies_ms
    low, high = found.low_ms, found.high_ms
    return Predicted(
        row["name"].replace("-h100-80gb", ""),
        _group(case, host_bound=found.host_bound),
        measured_ms,
        found.step_ms,
        kernels_ms(row),
        found.kernels_ms,
        inside=low <= measured_ms <= high,
    )


def _group(case: Case, *, host_bound: bool) -> str:
    if host_bound:
        return "waits for Python"
    if case.family.startswith(("resnet", "convnext")):
        return "convolutions"
    return f"compiled {case.compile}" if case.compile else "transformers, eager"


def section(rows: list[Predicted]) -> str:
    """The section of docs/times.md."""
    from benchmarks.shared import table

    by_group: dict[str, list[Predicted]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
    summary = [
        (
            group,
            str(len(of)),
            f"{statistics.median(row.error for row in of):+.1%}",
            f"{statistics.median(abs(row.error) for row in of):.1%}",
            f"{max((row.error for row in of), key=abs):+.0%}",
            f"{statistics.median(row.kernel_error for row in of):+.1%}",
            f"{sum(row.inside for row in of)} of {len(of)}",
        )
        for group, of in [*sorted(by_group.items()), ("all", rows)]
    ]
    worst_first = sorted(rows, key=lambda row: -abs(row.error))
    each = [
        (
            f"{row.error:+.0%}",
            row.name,
            f"{row.measured_ms:,.1f}",
            f"{row.predicted_ms:,.1f}",
            f"{row.measured_kernels_ms:,.1f}",
            f"{row.predicted_kernels_ms:,.1f}",
            "yes" if row.inside else "no",
        )
        for row in worst_first
    ]
    first = json.loads(RECORDED.read_text("utf-8").partition("\n")[0])
    versions = f"{first['card']['name']}, driver {first['card']['driver']}"
    versions += f", torch {first['software']['torch']}"
    return "\n\n".join(
        (
            HEADING,
            TEXT.format(versions=versions),
            table(
                ("", "steps", "signed median", "median", "worst", "kernels", "inside"),
                summary,
            ),
            table(
                (
                    *("error", "step", "measured ms", "predicted"),
                    *("kernels, measured ms", "predicted", "in the printed range"),
                ),
                each,
                left=0,
            ),
        )
    )


def with_section(page: str, section: str) -> str:
    r"""The page with its last section replaced, or added.

    >>> with_section("a\n\n## Recorded on an H100\n\nold\n", "new")
    'a\n\nnew\n'
    """
    return f"{page.partition(HEADING)[0].rstrip()}\n\n{section}\n"


def show() -> int:
    """Predict what is recorded, print it and write it to docs/times.md."""
    from docs.answers import write

    rows = [json.loads(line) for line in RECORDED.read_text("utf-8").splitlines()]
    made = section([predicted(row) for row in rows])
    sys.stdout.write(f"{made}\n")
    write(PAGE, with_section(PAGE.read_text("utf-8"), made))
    return 0


def main() -> int:
    """Record the cases that the command line names, or predict those recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=1.2)
    parser.add_argument("--cudnn", choices=("on", "off"), default="on")
    parser.add_argument("--kernels", action="store_true", help="profile one more step")
    parser.add_argument("--until", type=float, default=float("inf"), help="epoch time")
    options = parser.parse_args()
    if options.record is None:
        return show()
    choose_cudnn(enabled=options.cudnn == "on")
    torch.cuda.init()
    nvml = open_nvml()
    with options.record.open("a", encoding="utf-8") as file:
        for pattern in options.names:
            for name, case, tf32 in chosen(pattern):
                if time.time() > options.until:
                    sys.stdout.write("stopped: the time is over\n")
                    return 0
                began = time.perf_counter()
                row = {
                    "name": name,
                    "case": case.name,
                    "batch_size": case.batch_size,
                    "date": datetime.now(UTC).date().isoformat(),
                    "card": describe_card(nvml),
                    "tf32": tf32,
                }
                try:
                    row |= record(
                        *(case, options.seconds),
                        tf32=tf32,
                        with_kernels=options.kernels,
                    )
                except Exception as error:  # noqa: BLE001 - a row says what happened
                    row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                    traceback.print_exc()
                row["software"] = describe_software()
                row["software"] = describe_software()
                forget()
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                file.flush()
                took = time.perf_counter() - began
                said = row.get("error") or f"{row['step_ms']:.2f} ms"
                sys.stdout.write(f"{name}: {said} ({took:.1f} s)\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
