"""CUDA context size: memory of a process outside PyTorch's allocator, as a range.

The context and lazily loaded kernels cannot be derived from a model: estimated from
published reports, until ``verify`` has measured it on the GPU. The
reports are in ``cuda_context.toml``; docs/decisions/0013-process-range.md says how they
become a range and how often it holds.
"""

import functools
import math
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from budgetfit.gpus.table import Gpu, find_gpu

_MIB: Final = 2**20
_GIB: Final = 2**30

# The line that budgets use: it grows with the resident threads of the GPU. No report is
# more than 70 MiB above it (docs/decisions/0005-headroom-and-context.md).
_LINE_BASE_BYTES: Final = 64 * _MIB
_LINE_BYTES_PER_THREAD: Final = 2400

# Each capability has few reports: its mean is shrunk to the mean of all reports by so
# many pseudo-observations.
_PRIOR_REPORTS: Final = 2
# Standard deviations on each side. 2.03 would hold 95 % of normal errors with the
# reports' 36 degrees of freedom; their tails are heavier.
_WIDTH: Final = 2.2

# Other models load other kernels. Of the pairs of published reports of one GPU model,
# 54 of 69 differ by no more, and those differ in machine and driver, too.
_MEASURED_WIDTH_BYTES: Final = 64 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaContext:
    """Bytes of a process outside the allocator.

    Attributes:
        planned_bytes: Set aside by budgets; an upper estimate.
        low_bytes: 2.5 % quantile over processes.
        typical_bytes: Median.
        high_bytes: 97.5 % quantile.
        source: Where the numbers are from; can follow "the CUDA context".
        measured: When and where ``verify`` measured it; empty for an estimate.
    """

    planned_bytes: int
    low_bytes: int
    typical_bytes: int
    high_bytes: int
    source: str
    measured: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One published measurement: GPU name in the table, bytes outside the allocator."""

    gpu: str
    outside_bytes: float


def context_bytes(gpu: Gpu) -> int:
    """Return the planned CUDA context of a GPU without measurements."""
    # The line through the published reports. NCCL and CUDA graphs are not in it.
    resident_threads = gpu.sm_count * gpu.threads_per_sm
    return _LINE_BASE_BYTES + _LINE_BYTES_PER_THREAD * resident_threads


def estimated_context(
    gpu: Gpu, *, eager: bool = False, reports: Sequence[Report] | None = None
) -> CudaContext:
    """Estimate the CUDA context of a GPU from published ``reports``: all if left out.

    ``eager``: kernels are loaded eagerly, always below CUDA 11.7, later with
    ``CUDA_MODULE_LOADING=EAGER``.
    """
    reports = published_reports() if reports is None else reports
    line_bytes = context_bytes(gpu)
    middle, width = _log_ratio(gpu.compute_capability, reports)
    planned = line_bytes
    low = math.exp(middle - width) * line_bytes
    typical = math.exp(middle) * line_bytes
    high = max(math.exp(middle + width) * line_bytes, line_bytes)
    source = f"estimated from {_evidence(gpu, reports)}"
    if eager:
        factors = eager_factors()
        low, high = typical * min(factors), typical * max(factors)
        typical *= statistics.median(factors)
        planned = round(high)
        source += ", with every kernel loaded at the start (CUDA_MODULE_LOADING)"
    return CudaContext(
        planned_bytes=planned,
        low_bytes=round(low),
        typical_bytes=round(typical),
        high_bytes=round(high),
        source=source,
    )


def measured_context(measured_bytes: Sequence[int], where: str) -> CudaContext:
    """Return the range around measurements of ``verify`` on the GPU.

    ``where``: when and where the largest, which is planned with, was measured.
    """
    most = max(measured_bytes)
    return CudaContext(
        planned_bytes=most,
        low_bytes=max(min(measured_bytes) - _MEASURED_WIDTH_BYTES, 0),
        typical_bytes=round(statistics.median(measured_bytes)),
        high_bytes=most + _MEASURED_WIDTH_BYTES,
        source=f"measured {where} by verify",
        measured=where,
    )


@functools.cache
def published_reports() -> tuple[Report, ...]:
    """Return every published report of the table."""
    return tuple(
        Report(
            gpu=row["gpu"],
            outside_bytes=(process_gib - allocated_gib) * _GIB - unused_mib * _MIB,
        )
        for row in _table()["card"]
        for process_gib, allocated_gib, unused_mib in row["reports"]
    )


def eager_factors() -> tuple[float, ...]:
    """Return observed ratios of eager to lazy kernel loading."""
    return tuple(row["times"] for row in _table()["loading"])


def _log_ratio(
    capability: tuple[int, int], reports: Sequence[Report]
) -> tuple[float, float]:
    """Return middle and half width of log(outside / line) for a compute capability."""
    # Reports of one capability share a mean; the spread about it is pooled over all.
    by_capability: dict[tuple[int, int], list[float]] = {}
    for report in reports:
        gpu = find_gpu(report.gpu)
        ratio = math.log(report.outside_bytes / context_bytes(gpu))
        by_capability.setdefault(gpu.compute_capability, []).append(ratio)
    groups = by_capability.values()
    everything = [ratio for group in groups for ratio in group]
    freedom = len(everything) - len(by_capability)
    squares = sum((x - statistics.fmean(group)) ** 2 for group in groups for x in group)
    own = by_capability.get(capability, [])
    seen = len(own) + _PRIOR_REPORTS
    middle = (sum(own) + _PRIOR_REPORTS * statistics.fmean(everything)) / seen
    return middle, _WIDTH * math.sqrt(squares / freedom * (1 + 1 / seen))


def _evidence(gpu: Gpu, reports: Sequence[Report]) -> str:
    major, minor = gpu.compute_capability
    same_gpu = sum(report.gpu == gpu.name for report in reports)
    same_capability = sum(
        find_gpu(report.gpu).compute_capability == gpu.compute_capability
        for report in reports
    )
    if same_gpu:
        share = f"{same_gpu} of them for this card"
    elif same_capability:
        share = (
            f"{same_capability} of them for capability {major}.{minor}, "
            "none for this card"
        )
    else:
        share = f"none of them for capability {major}.{minor}"
    return f"{len(reports)} published reports, {share}"


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("cuda_context.toml").read_text("utf-8")
    return tomllib.loads(text)
