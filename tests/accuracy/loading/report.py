"""Print predicted against recorded memory of loading, and of training after it.

python -m tests.accuracy.loading.report [--h100]

On the null driver, or on a real H100 (torch 2.11, driver 580.159.04, cuDNN off).
"""

import json
import statistics
import sys
from dataclasses import dataclass

import torch

from budgetfit.inputs.arguments import Arguments
from budgetfit.memory.caching_allocator import CachingAllocator
from budgetfit.memory.replay import (
    UNLIMITED_BYTES,
    device_properties,
    replay,
    storage_bytes,
)
from budgetfit.traces.session import TraceSession
from tests.accuracy.loading.cases import CASES, FILE, LENGTH, SAMPLES, LoadingCase
from tests.accuracy.nulldriver.addresses import null_driver_addresses

GPU = "rtx-4090"
H100 = "h100-80gb"
ON_H100 = FILE.with_name("recordings-h100.json")
FIGURES = (
    *("loaded_allocated_bytes", "loaded_reserved_bytes"),
    *("allocated_bytes", "reserved_bytes"),
)
MIB = 2**20


@dataclass(frozen=True)
class Compared:
    """A case: predicted and recorded bytes of each of ``FIGURES``."""

    name: str
    predicted: dict[str, int]
    recorded: dict[str, int]

    def error(self, figure: str) -> float:
        """Signed: above zero means predicted too much."""
        return self.predicted[figure] / self.recorded[figure] - 1


def compare(name: str, recorded: dict[str, int], gpu: str = GPU) -> Compared:
    """Predict a case that was recorded."""
    with null_driver_addresses():
        return Compared(name, _predicted(CASES[name], gpu), recorded)


def _predicted(case: LoadingCase, gpu: str) -> dict[str, int]:
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    parsed = Arguments(
        model=case.config,
        gpu=gpu,
        batch={"input_ids": ids, "labels": ids},
        precision=case.recipe.precision,
        **case.asked,
    ).parsed()
    workload = parsed.workload
    trace = TraceSession(workload).exact(case.recipe)
    device = device_properties(workload.gpu)
    sizes = (storage_bytes(trace, SAMPLES, device) + 511) & -512
    allocator = CachingAllocator(UNLIMITED_BYTES)
    setup = trace.events[: trace.phases[0].end]
    allocator.run(setup.tolist(), sizes.tolist())
    timeline = replay(trace, SAMPLES, workload.gpu, limit_bytes=UNLIMITED_BYTES)
    steps = [point for point in timeline.points if point.phase != "setup"]
    return {
        "loaded_allocated_bytes": allocator.allocated_bytes,
        "loaded_reserved_bytes": allocator.reserved_bytes,
        "allocated_bytes": max(point.allocated_bytes for point in steps),
        "reserved_bytes": max(point.reserved_bytes for point in steps),
    }


def table(rows: list[Compared]) -> str:
    """One line for each case, the worst first, and the medians."""
    worst_first = sorted(
        rows, key=lambda row: -max(abs(row.error(figure)) for figure in FIGURES)
    )
    lines = [f"{'MiB, error':22}" + "".join(f"{name:>28}" for name in FIGURES)]
    for row in worst_first:
        values = (
            f"{row.recorded[figure] / MIB:>18,.1f}{row.error(figure):>+10.3%}"
            for figure in FIGURES
        )
        lines.append(f"{row.name:22}" + "".join(values))
    for figure in FIGURES:
        errors = [row.error(figure) for row in rows]
        lines.append(
            f"{figure}: {len(rows)} cases, median of sizes "
            f"{statistics.median(map(abs, errors)):.3%}, from {min(errors):+.3%} to "
            f"{max(errors):+.3%}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    on_h100 = "--h100" in sys.argv[1:]
    recorded = json.loads((ON_H100 if on_h100 else FILE).read_text())
    gpu = H100 if on_h100 else GPU
    rows = [compare(name, row, gpu) for name, row in recorded.items()]
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
