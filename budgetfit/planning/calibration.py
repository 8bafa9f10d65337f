"""What was measured of a card's context, for predictions; what was just measured, kept.

The budget's evidence changes here: published reports give way to what ``verify``
measured on the same card under the same CUDA major version, and say so.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
from typing import TYPE_CHECKING

import torch

from budgetfit.core.byte_text import format_bytes
from budgetfit.core.cuda_context import (
    CudaContext,
    estimated_context,
    measured_context,
)
from budgetfit.core.gpus import gpu_from_properties
from budgetfit.verifying.calibration_file import (
    CalibrationError,
    Measurement,
    keep_measurement,
    read_measurements,
)

if TYPE_CHECKING:
    from budgetfit.core.gpus import Gpu
    from budgetfit.verifying.process_memory import ProcessMemory

# A measurement this many times the published range's end is not believed: another
# process's memory was in it, or the file was edited.
_BELIEVED_TIMES = 2


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


def _major(version: str | None) -> int:
    return int(version.split(".")[0]) if version else 0
