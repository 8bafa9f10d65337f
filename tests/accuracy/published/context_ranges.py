"""The published process footprints against the ranges that the others of them leave."""

import itertools
from collections import defaultdict
from dataclasses import dataclass

from budgetfit.gpus.cuda_context import (
    CudaContext,
    Report,
    estimated_context,
    published_reports,
)
from budgetfit.gpus.table import find_gpu

MIB = 2**20


@dataclass(frozen=True)
class LeftOut:
    """A published report and the range without it."""

    report: Report
    expected: CudaContext

    @property
    def inside(self) -> bool:
        """Whether the report lies in the range."""
        low, high = self.expected.low_bytes, self.expected.high_bytes
        return low <= self.report.outside_bytes <= high


def left_out() -> list[LeftOut]:
    """Each report against the range that all the others leave for its card."""
    reports = published_reports()
    return [
        LeftOut(
            report,
            estimated_context(
                find_gpu(report.gpu), reports=reports[:index] + reports[index + 1 :]
            ),
        )
        for index, report in enumerate(reports)
    ]


def apart() -> list[float]:
    """How many bytes two reports of one card lie apart, every pair, sorted."""
    by_card: dict[str, list[float]] = defaultdict(list)
    for report in published_reports():
        by_card[report.gpu].append(report.outside_bytes)
    return sorted(
        abs(one - other)
        for found in by_card.values()
        for one, other in itertools.combinations(found, 2)
    )


def section() -> str:
    """The comparison as a section of the page."""
    found = left_out()
    inside = sum(row.inside for row in found)
    pairs = apart()
    within = sum(pair <= 64 * MIB for pair in pairs)
    text = (
        f"{len(found)} published out-of-memory messages tell what a process held "
        "outside PyTorch's allocator (CUDA context and loaded kernels). Each is "
        "compared with the range that budgetfit would print for its card had that "
        f"message never been published: **{inside} of {len(found)} "
        f"({inside / len(found):.1%}) lie in it**. Reserved bytes are known in these "
        "messages, so that the process lies in its range where this part does. Of two "
        f"reports of one card, {within} of {len(pairs)} pairs differ by at most 64 MiB."
    )
    lines = [
        "## Process: what is outside the allocator\n",
        text + "\n",
        "| card | reported MiB | low | typical | high | set aside | |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in found:
        expected = row.expected
        sizes = (
            row.report.outside_bytes,
            *(expected.low_bytes, expected.typical_bytes, expected.high_bytes),
            expected.planned_bytes,
        )
        numbers = " | ".join(f"{size / MIB:.0f}" for size in sizes)
        lines.append(
            f"| {row.report.gpu} | {numbers} | {'' if row.inside else 'outside'} |"
        )
    return "\n".join(lines)
