"""What ``verify`` measured on this user's cards, kept for later predictions.

One JSON file per user, in platformdirs' state folder or in ``BUDGETFIT_CALIBRATION``.
It is replaced as a whole, so that a reader sees either the old one or the new one, and
by one writer at a time, so that no record is lost. No trouble with it may break a plan
or a verification: it is told and passed over.
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

from budgetfit.calibration.file_lock import only_writer

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER_VARIABLE: Final = "BUDGETFIT_CALIBRATION"
FILE_NAME: Final = "calibration.json"
LOCK_NAME: Final = "calibration.lock"
KEPT: Final = 10  # of what is alike: the newest

Text = Annotated[str, Field(min_length=1, max_length=200)]
Date = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Milliseconds = Annotated[float, Field(gt=0, le=1e9)]


class Measurement(BaseModel):
    """One verification's context, and on what it was measured.

    Attributes:
        card: The card's title, as ``Gpu.title``.
        cuda_major: Of the CUDA runtime that torch was built with.
        outside_bytes: The process less what the allocator had reserved, after the
            steps.
        whole_card: It was read for the whole card: other processes may be in it.
        total_bytes: Of the card.
        driver: Its version; empty where NVML did not tell.
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


class StepTime(BaseModel):
    """One verification's time of an optimizer step, measured and predicted.

    Attributes:
        card: The card's title, as ``Gpu.title``.
        precision: Name of a policy of ``core.precision``.
        measured_ms: Median of the steps.
        roofline_ms: What ``timing.roofline`` says of the same step, unscaled.
        steps: How many were measured.
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
        """Measured over roofline."""
        return self.measured_ms / self.roofline_ms


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1]
    measurements: tuple[Measurement, ...] = ()
    step_times: tuple[StepTime, ...] = ()


Row = TypeVar("Row", bound=BaseModel)


class CalibrationError(Exception):
    """The file cannot be used; the text says why, for a note."""


def calibration_path() -> Path:
    """Return where the file is, or would be.

    Raises:
        CalibrationError: This user has no home.
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
        # Without a home, "~" stays as it is and would become a folder right here.
        raise CalibrationError(
            f"there is no home folder; {FOLDER_VARIABLE} can name one, from its root"
        )
    return folder / FILE_NAME


def read_measurements() -> tuple[Measurement, ...]:
    """Return the contexts that are kept, the oldest first; none before the first.

    Raises:
        CalibrationError: There is a file, and it cannot be used.
    """
    return _read().measurements


def read_step_times() -> tuple[StepTime, ...]:
    """Return the step times that are kept, the oldest first; none before the first.

    Raises:
        CalibrationError: There is a file, and it cannot be used.
    """
    return _read().step_times


def keep_measurement(measurement: Measurement) -> Path:
    """Add a context to the file and return its path.

    The newest ``KEPT`` of each card and CUDA version stay. A file that cannot be used
    is left alone: it may be somebody else's.

    Raises:
        CalibrationError: It cannot be written.
    """

    def added(known: _Document) -> _Document:
        rows = _with_newest(known.measurements, measurement, ("card", "cuda_major"))
        return known.model_copy(update={"measurements": rows})

    return _rewrite(added)


def keep_step_time(step_time: StepTime) -> Path:
    """Add a step's time to the file and return its path.

    The newest ``KEPT`` of each card and precision stay; else as ``keep_measurement``.

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
    return others + (*same, new)[-KEPT:]


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
    """Every candidate of a plan asks; the file is parsed once while it is the same."""
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
    """Read, change and replace the file while no other process does."""
    path = calibration_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with only_writer(path.with_name(LOCK_NAME)):
            document = change(_read())
            text = json.dumps(document.model_dump(mode="json"), indent=1) + "\n"
            _replace(path, text)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written ({_reason(error)})") from None
    return path


def _replace(path: Path, text: str) -> None:
    """Write beside the file, then put the new one in its place in one step."""
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
