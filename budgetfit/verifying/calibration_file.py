"""What ``verify`` measured on this user's cards, kept for later predictions.

One JSON file per user, in platformdirs' state folder or in ``BUDGETFIT_CALIBRATION``.
It is replaced as a whole, so that a reader sees either the old one or the new one. No
trouble with it may break a plan or a verification: it is told and passed over.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Final, Literal

from platformdirs import user_state_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError

FOLDER_VARIABLE: Final = "BUDGETFIT_CALIBRATION"
FILE_NAME: Final = "cuda_context.json"
KEPT: Final = 10  # measurements of one card under one CUDA version, the newest

Text = Annotated[str, Field(min_length=1, max_length=200)]


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
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1]
    measurements: tuple[Measurement, ...]


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
    """Return what is kept, the oldest first; nothing where nothing was kept yet.

    Raises:
        CalibrationError: There is a file, and it cannot be used.
    """
    path = calibration_path()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read ({_reason(error)})") from None
    try:
        return _Document.model_validate_json(text).measurements
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CalibrationError(
            f"{path} is damaged or not budgetfit's ({f'{where}: ' if where else ''}"
            f"{first['msg']})"
        ) from None


def keep_measurement(measurement: Measurement) -> Path:
    """Add a measurement to the file and return its path.

    The newest ``KEPT`` of each card and CUDA version stay. A file that cannot be used
    is left alone: it may be somebody else's.

    Raises:
        CalibrationError: It cannot be written.
    """
    path = calibration_path()
    known = read_measurements()
    same = [*(row for row in known if _alike(row, measurement)), measurement]
    others = [row for row in known if not _alike(row, measurement)]
    document = _Document(format=1, measurements=(*others, *same[-KEPT:]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps(document.model_dump(mode="json"), indent=1) + "\n")
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written ({_reason(error)})") from None
    return path


def _alike(one: Measurement, other: Measurement) -> bool:
    return (one.card, one.cuda_major) == (other.card, other.cuda_major)


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
