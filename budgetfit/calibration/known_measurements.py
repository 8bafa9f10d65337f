"""Use and store calibration: CUDA context sizes and step times from ``verify``.

A context size measured on the same card under the same CUDA major version replaces
published reports; predicted times are multiplied by the ratio of measured steps on that
card. Notes and provenance say so.
"""

import datetime as dt
import os
import platform
import statistics
from typing import NamedTuple

import torch

from budgetfit.calibration.file import (
    CalibrationError,
    ContextMeasurement,
    StepTimeMeasurement,
    add_measurement,
    read_calibration,
)
from budgetfit.core.plan import Plan
from budgetfit.core.verification import Verification
from budgetfit.gpus.cuda_context import CudaContext, estimated_context, measured_context
from budgetfit.gpus.table import Gpu, gpu_from_properties
from budgetfit.measuring.process_memory import ProcessMemory
from budgetfit.utils.format_bytes import format_bytes

# A measurement beyond the published range by this factor is not plausible: it includes
# another process's memory, or the file was edited.
_PLAUSIBLE_FACTOR = 2
# No step is this much faster than its kernels by the card's rates; one this much
# slower shared the card, or waited for data.
_PLAUSIBLE_RATIO = (0.4, 20.0)
# Shorter micro-batches are bound by kernel launches, which says nothing about steps
# that are bound by the GPU.
_MIN_MS = 30.0


def gpu_of_device(device: torch.device) -> Gpu:
    """Return the ``Gpu`` of a CUDA device of this machine."""
    found = torch.cuda.get_device_properties(device)
    return gpu_from_properties(
        found.name,
        found.total_memory,
        (found.major, found.minor),
        found.multi_processor_count,
        found.max_threads_per_multi_processor,
    )


def cuda_version() -> str | None:
    """Return the CUDA runtime of this torch; None for a build without CUDA."""
    return torch.version.cuda


def context_for(gpu: Gpu) -> tuple[CudaContext, tuple[str, ...]]:
    """Return the CUDA context size of a card, and notes for the plan."""
    # As measured by ``verify`` on a card of this title under this CUDA major version;
    # else from published reports.
    version = cuda_version()
    eager = version is not None and os.environ.get("CUDA_MODULE_LOADING") == "EAGER"
    estimate = estimated_context(gpu, eager=eager)
    try:
        kept = read_calibration().measurements
    except CalibrationError as error:
        return estimate, (f"what verify measured before was not used: {error}",)
    same = [
        row
        for row in kept
        if row.card == gpu.title and row.cuda_major == _major(version)
    ]
    plausible = [row for row in same if is_plausible_context(row.outside_bytes, gpu)]
    notes: list[str] = []
    if len(plausible) < len(same):
        notes.append(
            "a CUDA context that verify kept was not used: it is far outside what was "
            f"published of the {gpu.title}"
        )
    if not plausible:
        return estimate, tuple(notes)
    most = max(plausible, key=lambda row: row.outside_bytes)
    here = "this machine" if most.host == platform.node() else "another machine"
    found = measured_context(
        [row.outside_bytes for row in plausible], f"on {here} on {most.date}"
    )
    return found, tuple(notes)


def is_plausible_context(outside_bytes: int, gpu: Gpu) -> bool:
    """Whether so many bytes are plausible as one process's context on this card."""
    low = estimated_context(gpu).low_bytes / _PLAUSIBLE_FACTOR
    high = estimated_context(gpu, eager=True).high_bytes * _PLAUSIBLE_FACTOR
    return low <= outside_bytes <= high


def store_context(measured: ProcessMemory | None, gpu: Gpu) -> str:
    """Store a context measured after the last step, if any; return a note."""
    if measured is None:
        return "The CUDA context was not measured: no step ran to its end."
    size = format_bytes(measured.outside_bytes)
    # A reading of the whole card may include other processes.
    limit = estimated_context(gpu).high_bytes if measured.whole_card else None
    if not is_plausible_context(measured.outside_bytes, gpu) or (
        limit is not None and measured.outside_bytes > limit
    ):
        return (
            f"The process held {size} outside the allocator; as a CUDA context that "
            "is not plausible, so it was not kept for later predictions."
        )
    version = cuda_version()
    if version is None:
        return "The CUDA context was not kept: this torch does not tell its CUDA."
    try:
        path = add_measurement(
            ContextMeasurement(
                card=gpu.title,
                cuda_major=_major(version),
                outside_bytes=measured.outside_bytes,
                whole_card=measured.whole_card,
                total_bytes=gpu.total_bytes,
                driver=measured.driver,
                cuda=version,
                torch=str(torch.__version__),
                host=platform.node(),
                date=dt.datetime.now(dt.UTC).date().isoformat(),
            )
        )
    except CalibrationError as error:
        return f"The CUDA context of {size} was not kept: {error}."
    return f"Later predictions for this card use its CUDA context of {size}: {path}"


class TimeFactor(NamedTuple):
    """Ratio of measured to predicted step times on a card.

    Attributes:
        ratio: Median of measured over predicted.
        precision: Of the measurements, if not the requested one; else empty.
        date: Of the last, ISO.
        place: The machine, for the note.
    """

    ratio: float
    runs: int
    precision: str
    date: str
    place: str

    @property
    def note(self) -> str:
        """Text on the source of times, for notes and provenance."""
        runs = "1 verification" if self.runs == 1 else f"{self.runs} verifications"
        other = f" in {self.precision}" if self.precision else ""
        return (
            f"times: predicted x {self.ratio:.2f}, measured on {self.place} by {runs}"
            f"{other}, the last on {self.date}"
        )


def times_source(gpu: Gpu, precision: str) -> str:
    """Return the source of the times on a card, for a plan's provenance."""
    factor = time_factor(gpu, precision)
    if factor is None:
        return "kernel times by the card's rates"
    return factor.note.removeprefix("times: ")


def time_factor(gpu: Gpu, precision: str) -> TimeFactor | None:
    """Return the factor for predicted times on a card; None if nothing was measured."""
    # The median of the measurements in this precision, or else in all others:
    # precisions are compared with each other, and one that was never measured must not
    # look faster.
    try:
        kept = read_calibration().measured_steps
    except CalibrationError:
        return None  # context_for has a note on it
    card = [
        row for row in kept if row.card == gpu.title and _is_plausible_ratio(row.ratio)
    ]
    same = [row for row in card if row.precision == precision]
    rows = same or card
    if not rows:
        return None
    hosts = {row.host for row in rows}
    here = "this machine" if hosts == {platform.node()} else "another machine"
    return TimeFactor(
        ratio=statistics.median(row.ratio for row in rows),
        runs=len(rows),
        precision="" if same else ", ".join(sorted({row.precision for row in rows})),
        date=max(row.date for row in rows),
        place=here if len(hosts) == 1 else "several machines",
    )


def store_step_time(check: Verification, plan: Plan, gpu: Gpu) -> str:
    """Store a step time measured on ``gpu`` for later plans, and return a note."""
    # The prediction may have an earlier factor.
    predicted_ms = plan.estimate.step_ms / plan.estimate.time_factor
    if not check.passed or not check.step_ms or not predicted_ms:
        return "The step's time was not kept: the plan did not run as it was made."
    if plan.gpu.title != gpu.title:
        return (
            f"The step's time was not kept: it was predicted for the {plan.gpu.title}."
        )
    ratio = check.step_ms / predicted_ms
    found = f"The step took {ratio:.2f} times as long as predicted"
    if check.step_ms / plan.recipe.gradient_accumulation_steps < _MIN_MS:
        return (
            f"{found}, which was not kept: a micro-batch below {_MIN_MS:g} ms is "
            "mostly launches and says little about longer ones."
        )
    if not _is_plausible_ratio(ratio):
        return f"{found}; that is not plausible, so it was not kept for later plans."
    precision = plan.recipe.precision
    try:
        path = add_measurement(
            StepTimeMeasurement(
                card=gpu.title,
                precision=precision,
                measured_ms=check.step_ms,
                predicted_ms=predicted_ms,
                steps=check.steps,
                torch=str(torch.__version__),
                host=platform.node(),
                date=dt.datetime.now(dt.UTC).date().isoformat(),
            )
        )
    except CalibrationError as error:
        return f"{found}, which was not kept: {error}."
    factor = time_factor(gpu, precision)
    later = f"{factor.ratio:.2f}, the median of {factor.runs}" if factor else "it"
    return (
        f"{found}. Later plans for this card in {precision} multiply times by {later}: "
        f"{path}"
    )


def _is_plausible_ratio(ratio: float) -> bool:
    low, high = _PLAUSIBLE_RATIO
    return low <= ratio <= high


def _major(version: str | None) -> int:
    return int(version.split(".")[0]) if version else 0
