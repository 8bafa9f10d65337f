"""The calibration file: CUDA contexts and step times that ``verify`` measured.

One JSON file per user, in platformdirs' state folder or in ``BUDGETFIT_CALIBRATION``.
It is replaced atomically, so that a reader sees either the old or the new one, and
under a lock, so that no record is lost. Errors never break a plan or a verification:
they become notes.
"""

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from platformdirs import user_state_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from budgetfit.utils.whole_file import write_whole

FOLDER_VARIABLE: Final = "BUDGETFIT_CALIBRATION"
FILE_NAME: Final = "calibration.json"
LOCK_NAME: Final = "calibration.lock"
# Writers hold the lock for milliseconds.
LOCK_TIMEOUT_S: Final = 10.0
_PAUSE_S: Final = 0.01
MAX_KEPT: Final = 10  # newest records per card and CUDA version or precision

Text = Annotated[str, Field(min_length=1, max_length=200)]
Date = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Milliseconds = Annotated[float, Field(gt=0, le=1e9)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ContextMeasurement(_Strict):
    """A CUDA context size measured by ``verify``.

    Attributes:
        card: The card's title, as ``Gpu.title``.
        cuda_major: Of the CUDA runtime that torch was built with.
        outside_bytes: Process memory less the allocator's reserved bytes, after the
            steps.
        whole_card: Read for the whole card, other processes possibly included.
        driver: Its version; empty if unknown.
        cuda: The runtime's version.
        date: ISO, UTC.
    """

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


class StepTimeMeasurement(_Strict):
    """The time of an optimizer step, measured by ``verify`` and predicted.

    Attributes:
        card: The card's title, as ``Gpu.title``.
        precision: Name of a policy of ``core.precision``.
        measured_ms: Median of the steps.
        predicted_ms: The same step by ``timing.kernel_times``, unscaled.
        steps: Number of measured steps.
        date: ISO, UTC.
    """

    card: Text
    precision: Text
    measured_ms: Milliseconds
    predicted_ms: Milliseconds
    steps: Annotated[int, Field(ge=1)]
    torch: Text
    host: Annotated[str, Field(max_length=200)]
    date: Date

    @property
    def ratio(self) -> float:
        """Measured time over predicted time."""
        return self.measured_ms / self.predicted_ms


class Calibration(_Strict):
    """What the file holds, oldest first.

    ``step_times`` were compared with the predictions of version 0.1 and are not used.
    """

    format: Literal[1]
    measurements: tuple[ContextMeasurement, ...] = ()
    step_times: tuple[Any, ...] = ()
    measured_steps: tuple[StepTimeMeasurement, ...] = ()


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


def read_calibration() -> Calibration:
    """Return what is stored; empty without a file.

    Raises:
        CalibrationError: There is a file, and it cannot be used.
    """
    path = calibration_path()
    try:
        found = path.stat()
        return _parsed(path, found.st_ino, found.st_mtime_ns, found.st_size)
    except FileNotFoundError:
        return Calibration(format=1)
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read ({_reason(error)})") from None


def add_measurement(new: ContextMeasurement | StepTimeMeasurement) -> Path:
    """Add a CUDA context or a step time to the file and return its path.

    The newest ``MAX_KEPT`` of each card and CUDA version or precision stay. A file that
    cannot be parsed is not overwritten: it may belong to another program.

    Raises:
        CalibrationError: It cannot be written.
    """
    of_context = isinstance(new, ContextMeasurement)
    name = "measurements" if of_context else "measured_steps"
    kind = attrgetter("card", "cuda_major" if of_context else "precision")
    path = calibration_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(path.with_name(LOCK_NAME)):
            document = read_calibration()
            rows = getattr(document, name)
            same = [row for row in rows if kind(row) == kind(new)]
            others = [row for row in rows if kind(row) != kind(new)]
            kept = (*others, *(*same, new)[-MAX_KEPT:])
            document = document.model_copy(update={name: kept})
            text = json.dumps(document.model_dump(mode="json"), indent=1) + "\n"
            write_whole(path, text, private=True)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written ({_reason(error)})") from None
    return path


@functools.lru_cache(maxsize=4)
def _parsed(path: Path, _inode: int, _mtime_ns: int, _size_bytes: int) -> Calibration:
    """Parse the file once per version: every candidate of a plan reads it."""
    text = path.read_text(encoding="utf-8")
    try:
        return Calibration.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CalibrationError(
            f"{path} is damaged or not budgetfit's ({f'{where}: ' if where else ''}"
            f"{first['msg']})"
        ) from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _try_lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def exclusive_lock(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock, across processes, on the file ``lock``; made if missing.

    The file is not removed: another process could then lock a new one. The operating
    system releases the lock when the file is closed or the process exits.

    Raises:
        OSError: The file cannot be made or locked.
        TimeoutError: Another process held it for ``LOCK_TIMEOUT_S`` seconds.
    """
    with lock.open("ab") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                _try_lock(file.fileno())
                break
            except (BlockingIOError, PermissionError) as error:
                if time.monotonic() > deadline:
                    text = f"another process has been writing for {LOCK_TIMEOUT_S:g} s"
                    raise TimeoutError(None, text, str(lock)) from error
                time.sleep(_PAUSE_S)
        yield
