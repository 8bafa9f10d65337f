"""The calibration file: CUDA contexts and step times that ``verify`` measured.

One JSON file per user, in platformdirs' state folder or in ``BUDGETFIT_CALIBRATION``.
It is replaced atomically, so that a reader sees either the old or the new one, and
under a lock, so that no record is lost. Errors never break a plan or a verification:
they become notes.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar

from platformdirs import user_state_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from budgetfit.calibration.file_lock import exclusive_lock

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER_VARIABLE: Final = "BUDGETFIT_CALIBRATION"
FILE_NAME: Final = "calibration.json"
LOCK_NAME: Final = "calibration.lock"
MAX_KEPT: Final = 10  # newest records per card and CUDA version or precision

Text = Annotated[str, Field(min_length=1, max_length=200)]
Date = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Milliseconds = Annotated[float, Field(gt=0, le=1e9)]


class ContextMeasurement(BaseModel):
    """A CUDA context size measured by ``verify``.

    Attributes:
        card: The card's title, as ``Gpu.title``.
        cuda_major: Of the CUDA runtime that torch was built with.
        outside_bytes: Process memory less the allocator's reserved bytes, after the
            steps.
        whole_card: Read for the whole card, other processes possibly included.
        total_bytes: Of the card.
        driver: Its version; empty if unknown.
        cuda: The runtime's version.
        torch: Its version.
        host: The machine.
        date: ISO, UTC.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    card: Text
    cuda_major: Annotated[int, Field(ge=1, le=99)]
    outside_bytes: Annotated[int, Field(ge=2**20, le=2**33)]
    whole_card: bool
    total_bytes: Annotated[int, Field(gt=0)]
    driver: Annotated[str, Field(max_length=200)]
    cuda: Text
    torch: Text
    host: Annotated[str, Field(max_length=200)]
    date: Date


class StepTimeMeasurement(BaseModel):
    """The time of an optimizer step, measured by ``verify`` and predicted.

    Attributes:
        card: The card's title, as ``Gpu.title``.
        precision: Name of a policy of ``core.precision``.
        measured_ms: Median of the steps.
        roofline_ms: The same step by ``timing.roofline``, unscaled.
        steps: Number of measured steps.
        torch: Its version.
        host: The machine.
        date: ISO, UTC.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    card: Text
    precision: Text
    measured_ms: Milliseconds
    roofline_ms: Milliseconds
    steps: Annotated[int, Field(ge=1)]
    torch: Text
    host: Annotated[str, Field(max_length=200)]
    date: Date

    @property
    def ratio(self) -> float:
        """Measured time over roofline time."""
        return self.measured_ms / self.roofline_ms


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1]
    measurements: tuple[ContextMeasurement, ...] = ()
    step_times: tuple[StepTimeMeasurement, ...] = ()


Row = TypeVar("Row", bound=BaseModel)


class CalibrationError(Exception):
    """The calibration file cannot be used; the message is for a note."""


def calibration_path() -> Path:
    """Return the path of the calibration file, which may not exist.

    Raises:
        CalibrationError: There is no home folder.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    try:
        folder = (
            Path(chosen).expanduser()
            if chosen
            else user_state_path("budgetfit", appauthor=False)
        )
    except RuntimeError:
        folder = Path()
    if not folder.is_absolute():
        # Without a home, "~" is not expanded and would become a relative folder.
        raise CalibrationError(
            f"there is no home folder; {FOLDER_VARIABLE} can name one, from its root"
        )
    return folder / FILE_NAME


def read_context_measurements() -> tuple[ContextMeasurement, ...]:
    """Return the stored CUDA contexts, oldest first; empty without a file.

    Raises:
        CalibrationError: There is a file, and it cannot be used.
    """
    return _read().measurements


def read_step_times() -> tuple[StepTimeMeasurement, ...]:
    """Return the stored step times, oldest first; empty without a file.

    Raises:
        CalibrationError: There is a file, and it cannot be used.
    """
    return _read().step_times


def add_context_measurement(measurement: ContextMeasurement) -> Path:
    """Add a CUDA context to the file and return its path.

    The newest ``MAX_KEPT`` of each card and CUDA version stay. A file that cannot be
    parsed is not overwritten: it may belong to another program.

    Raises:
        CalibrationError: It cannot be written.
    """

    def added(known: _Document) -> _Document:
        rows = _with_newest(known.measurements, measurement, ("card", "cuda_major"))
        return known.model_copy(update={"measurements": rows})

    return _rewrite(added)


def add_step_time(step_time: StepTimeMeasurement) -> Path:
    """Add a step time to the file and return its path.

    The newest ``MAX_KEPT`` of each card and precision stay; see also
    ``add_context_measurement``.

    Raises:
        CalibrationError: It cannot be written.
    """

    def added(known: _Document) -> _Document:
        rows = _with_newest(known.step_times, step_time, ("card", "precision"))
        return known.model_copy(update={"step_times": rows})

    return _rewrite(added)


def _with_newest(
    rows: tuple[Row, ...], new: Row, names: tuple[str, str]
) -> tuple[Row, ...]:
    def alike(row: Row) -> bool:
        return all(getattr(row, name) == getattr(new, name) for name in names)

    same = tuple(row for row in rows if alike(row))
    others = tuple(row for row in rows if not alike(row))
    return others + (*same, new)[-MAX_KEPT:]


def _read() -> _Document:
    path = calibration_path()
    try:
        found = path.stat()
        return _parsed(path, found.st_ino, found.st_mtime_ns, found.st_size)
    except FileNotFoundError:
        return _Document(format=1)
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read ({_reason(error)})") from None


@functools.lru_cache(maxsize=4)
def _parsed(path: Path, _inode: int, _mtime_ns: int, _size_bytes: int) -> _Document:
    """Parse the file once per version: every candidate of a plan reads it."""
    text = path.read_text(encoding="utf-8")
    try:
        return _Document.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CalibrationError(
            f"{path} is damaged or not budgetfit's ({f'{where}: ' if where else ''}"
            f"{first['msg']})"
        ) from None


def _rewrite(change: Callable[[_Document], _Document]) -> Path:
    """Read, change and replace the file under the lock."""
    path = calibration_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(path.with_name(LOCK_NAME)):
            document = change(_read())
            text = json.dumps(document.model_dump(mode="json"), indent=1) + "\n"
            _replace(path, text)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written ({_reason(error)})") from None
    return path


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically: write a temporary file, then rename it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
