"""``--save``: a place that cannot be written costs no work, and no answer."""

import os
from pathlib import Path

from budgetfit.errors import InputError


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written; what is there stays as it is.

    Raises:
        InputError: With the reason.
    """
    place = Path(os.path.realpath(path))  # where a link leads to need not exist yet
    try:
        new = not place.exists()
        if new or place.is_file() or place.is_dir():  # opening a pipe is no check
            with place.open("xb" if new else "r+b"):
                pass
        if new:
            place.unlink()
    except OSError as error:
        raise InputError(_cannot_write(path, error)) from None


def write(path: Path | None, text: str) -> str:
    """Write a file, if one is named; return why it could not be, or nothing."""
    if path is not None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            return _cannot_write(path, error)
    return ""


def _cannot_write(path: Path, error: OSError) -> str:
    return f"Cannot write {str(path)!r}: {error.strerror}. Name another file in --save."
