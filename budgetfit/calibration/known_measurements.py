"""What ``verify`` measured on a card, for predictions; what was just measured, kept.

The evidence changes here, and says so. Published reports of the CUDA context give way
to what was measured on the same card under the same CUDA major version; the roofline's
times are multiplied by how much longer real steps took on that card.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
from typing import TYPE_CHECKING, NamedTuple

import torch

from budgetfit.calibration.file import (
    CalibrationError,
    Measurement,
    StepTime,
    keep_measurement,
    keep_step_time,
    read_measurements,
    read_step_times,
)
from budgetfit.gpus.cuda_context import (
    CudaContext,
    estimated_context,
    measured_context,
)
from budgetfit.gpus.table import gpu_from_properties
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from budgetfit.core.plan import Plan, Verification
    from budgetfit.gpus.table import Gpu
    from budgetfit.measuring.process_memory import ProcessMemory

# A measurement this many times the published range's end is not believed: another
# process's memory was in it, or the file was edited.
_BELIEVED_TIMES = 2
# Nothing is this much faster than a roofline at 0.6 of the card's rates, and what is
# this much slower shared the card, or waited for something else.
_BELIEVED_RATIO = (0.4, 20.0)
# Below, a micro-batch is mostly waiting for Python to launch kernels, which says
# nothing about steps that keep the card busy.
_LEAST_MS = 30.0


def card_of(device: torch.device) -> Gpu:
    """Return a CUDA device of this machine, with what the table knows of it."""
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


def known_context(gpu: Gpu) -> tuple[CudaContext, tuple[str, ...]]:
    """Return the best that is known of a card's context, and notes for the plan.

    What ``verify`` measured on a card of this title under this CUDA major version;
    where there is none, published reports.
    """
    version = cuda_version()
    eager = version is not None and os.environ.get("CUDA_MODULE_LOADING") == "EAGER"
    estimate = estimated_context(gpu, eager=eager)
    try:
        kept = read_measurements()
    except CalibrationError as error:
        return estimate, (f"what verify measured before was not used: {error}",)
    same = [
        row
        for row in kept
        if row.card == gpu.title and row.cuda_major == _major(version)
    ]
    believed = [row for row in same if is_believed(row.outside_bytes, gpu)]
    notes: list[str] = []
    if len(believed) < len(same):
        notes.append(
            "a CUDA context that verify kept was not used: it is far outside what was "
            f"published of the {gpu.title}"
        )
    if not believed:
        return estimate, tuple(notes)
    most = max(believed, key=lambda row: row.outside_bytes)
    here = "this machine" if most.host == platform.node() else "another machine"
    found = measured_context(
        [row.outside_bytes for row in believed], f"on {here} on {most.date}"
    )
    return found, tuple(notes)


def is_believed(outside_bytes: int, gpu: Gpu) -> bool:
    """Whether so many bytes can be one process's context on this card."""
    low = estimated_context(gpu).low_bytes / _BELIEVED_TIMES
    high = estimated_context(gpu, eager=True).high_bytes * _BELIEVED_TIMES
    return low <= outside_bytes <= high


def remember_context(measured: ProcessMemory | None, gpu: Gpu) -> str:
    """Keep what was measured for later predictions, and return a note on it.

    Args:
        measured: Of the last step that ran to its end; None if none did.
        gpu: The card that it was measured on.
    """
    if measured is None:
        return "The CUDA context was not measured: no step ran to its end."
    size = format_bytes(measured.outside_bytes)
    # On a whole card, other processes would be taken for this one's context.
    limit = estimated_context(gpu).high_bytes if measured.whole_card else None
    if not is_believed(measured.outside_bytes, gpu) or (
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
        path = keep_measurement(
            Measurement(
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
    """How much longer than the roofline steps take on a card.

    Attributes:
        ratio: Median of measured over roofline.
        runs: How many verifications.
        precision: Of theirs, where it is not the one asked for; else empty.
        date: Of the last, ISO.
        place: Which machine.
    """

    ratio: float
    runs: int
    precision: str
    date: str
    place: str

    @property
    def note(self) -> str:
        """Say where times are from, for plans and their provenance."""
        runs = "1 verification" if self.runs == 1 else f"{self.runs} verifications"
        other = f" in {self.precision}" if self.precision else ""
        return (
            f"times: roofline x {self.ratio:.2f}, measured on {self.place} by {runs}"
            f"{other}, the last on {self.date}"
        )


def times_source(gpu: Gpu, precision: str) -> str:
    """Say where the times on a card are from, for a plan's provenance."""
    factor = time_factor(gpu, precision)
    if factor is None:
        return "roofline of the card's rates"
    return factor.note.removeprefix("times: ")


def time_factor(gpu: Gpu, precision: str) -> TimeFactor | None:
    """Return what the roofline's times on a card are multiplied by; None: unknown.

    The median of what was measured in this precision. Where that is nothing, the
    median in all others: precisions are compared with each other, and one that was
    never measured must not look faster for it.
    """
    try:
        kept = read_step_times()
    except CalibrationError:
        return None  # known_context tells it
    card = [row for row in kept if row.card == gpu.title and _is_believed(row.ratio)]
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


def remember_step_time(check: Verification, plan: Plan, gpu: Gpu) -> str:
    """Keep a verification's step time for later plans, and return a note on it.

    Args:
        check: What was measured, on a CUDA card.
        plan: What was predicted, maybe with an earlier factor.
        gpu: The card that it was measured on.
    """
    roofline_ms = plan.estimate.step_ms / plan.estimate.time_factor
    if not check.passed or not check.step_ms or not roofline_ms:
        return "The step's time was not kept: the plan did not run as it was made."
    if plan.gpu.title != gpu.title:
        return (
            f"The step's time was not kept: it was predicted for the {plan.gpu.title}."
        )
    ratio = check.step_ms / roofline_ms
    found = f"The step took {ratio:.2f} times the roofline"
    if check.step_ms / plan.recipe.gradient_accumulation_steps < _LEAST_MS:
        return (
            f"{found}, which was not kept: a micro-batch below {_LEAST_MS:g} ms is "
            "mostly launches and says little about longer ones."
        )
    if not _is_believed(ratio):
        return f"{found}; that is not plausible, so it was not kept for later plans."
    precision = plan.recipe.precision
    try:
        path = keep_step_time(
            StepTime(
                card=gpu.title,
                precision=precision,
                measured_ms=check.step_ms,
                roofline_ms=roofline_ms,
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


def _is_believed(ratio: float) -> bool:
    low, high = _BELIEVED_RATIO
    return low <= ratio <= high


def _major(version: str | None) -> int:
    return int(version.split(".")[0]) if version else 0
