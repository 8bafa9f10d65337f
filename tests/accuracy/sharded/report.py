"""Print predicted against recorded memory of one rank of several, the worst first.

    python -m tests.accuracy.sharded.report [NAME...]

Every case is in the table. Errors are signed: above zero means predicted too much. A
phase counts as exact where allocated and reserved bytes are equal.
"""

import json
import statistics
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from budgetfit.gpus.table import find_gpu
from budgetfit.inputs.arguments import Arguments
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.traces.session import TraceSession
from tests.accuracy.nulldriver.addresses import null_driver_addresses
from tests.accuracy.nulldriver.outliers import no_outliers
from tests.accuracy.sharded.cases import CASES, FILE, MODELS, STEPS, ShardedCase

Peaks = list[tuple[str, int, int]]


@dataclass(frozen=True)
class Compared:
    """A case: the peaks of its phases in bytes, predicted and recorded."""

    name: str
    predicted: Peaks
    recorded: Peaks

    def error(self, column: int) -> float:
        """Of the highest peak of all phases: 1 allocated, 2 reserved bytes."""
        most = (
            max(row[column] for row in rows) for rows in (self.predicted, self.recorded)
        )
        predicted, recorded = most
        return predicted / recorded - 1

    @property
    def exact_phases(self) -> int:
        """Phases in which both are equal."""
        return sum(
            one == other
            for one, other in zip(self.predicted, self.recorded, strict=True)
        )

    @property
    def worst_phase(self) -> float:
        """The largest error of a phase, allocated or reserved."""
        errors = [
            one[column] / other[column] - 1
            for one, other in zip(self.predicted, self.recorded, strict=True)
            for column in (1, 2)
            if other[column]
        ]
        return max(errors, key=abs)

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key: the worst first."""
        worst = max(abs(self.error(column)) for column in (1, 2))
        return -worst, -abs(self.worst_phase)


def compare(name: str, recorded: list[list[Any]]) -> Compared:
    """Predict a case that was recorded."""
    rows = [(str(phase), int(a), int(r)) for phase, a, r in recorded]
    # The null driver has no cuDNN.
    with (
        null_driver_addresses(),
        no_outliers() if "int8" in CASES[name].loaded else nullcontext(),
        torch.backends.cudnn.flags(enabled=False),
    ):
        return Compared(name, predict(CASES[name]), rows)


def predict(case: ShardedCase) -> Peaks:
    """Return the peaks of the setup and of each phase of each step."""
    loading = case.loading
    parsed = Arguments(
        model=MODELS[case.model].build() if loading is None else loading.config,
        gpu=case.card,
        batch=case.batch("cpu"),
        precision=case.precision,
        **({} if loading is None else loading.asked),
    ).parsed()
    assert parsed.workload.blocks == case.blocks, parsed.workload.blocks
    trace = TraceSession(parsed.workload).exact(case.recipe)
    timeline = replay(
        trace,
        case.samples,
        find_gpu(case.card),
        limit_bytes=UNLIMITED_BYTES,
        micro_steps=case.accumulation,
    )
    points = [point for point in timeline.points if point.step < STEPS]
    rows = [
        (
            str(phase[2]),
            max(point.allocated_bytes for point in group),
            max(point.reserved_bytes for point in group),
        )
        for phase, found in groupby(points, lambda p: (p.step, p.micro_step, p.phase))
        if (group := list(found))
    ]
    # Steps that were not replayed are as the last one.
    step = 2 * case.accumulation + 1
    missing = 1 + STEPS * step - len(rows)
    return rows + rows[len(rows) - step :] * (missing // step)


def table(rows: list[Compared]) -> str:
    """One line for each case, the worst first, and the totals."""
    lines = [
        "| case | allocated | reserved | worst phase | exact phases | res. / alloc. |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda each: each.rank):
        ratio = max(r[2] for r in row.recorded) / max(r[1] for r in row.recorded)
        lines.append(
            f"| {row.name} | {row.error(1):+.3%} | {row.error(2):+.3%} | "
            f"{row.worst_phase:+.3%} | {row.exact_phases} of {len(row.recorded)} | "
            f"{ratio:.2f} |"
        )
    lines.append("")
    for column, what in ((1, "allocated"), (2, "reserved")):
        errors = [row.error(column) for row in rows]
        exact = sum(error == 0 for error in errors)
        lines.append(
            f"{what}: {exact} of {len(rows)} exact, median "
            f"{statistics.median(errors):+.3%}, worst {max(errors, key=abs):+.3%}"
        )
    phases = sum(row.exact_phases for row in rows)
    total = sum(len(row.recorded) for row in rows)
    lines.append(f"phases: {phases} of {total} exact in both")
    return "\n".join(lines)


def main() -> None:
    """Compare all cases, or those named."""
    recordings = json.loads(FILE.read_text("utf-8"))
    names = sys.argv[1:] or recordings
    print(table([compare(name, recordings[name]) for name in names]))


if __name__ == "__main__":
    main()
