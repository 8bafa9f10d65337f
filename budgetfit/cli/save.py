"""``--save``: check early that a file can be written, and write it."""

import os
from pathlib import Path

from budgetfit.errors import InputError


def check_writable(path: Path) -> None:
    """Check that a file can be written; an existing one is not changed.

    Raises:
        InputError: With the reason.
    """
    place = Path(os.path.realpath(path))  # the target of a symlink need not exist yet
    try:
        new = not place.exists()
        if (
            new or place.is_file() or place.is_dir()
        ):  # a pipe must not be opened for a check
            with place.open("xb" if new else "r+b"):
                pass
        if new:
            place.unlink()
    except OSError as error:
        raise InputError(_cannot_write(path, error)) from None


def write(path: Path | None, text: str) -> str:
    """Write a file, if given; return why it failed, or an empty text."""
    if path is not None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            return _cannot_write(path, error)
    return ""


def _cannot_write(path: Path, error: OSError) -> str:
    return f"Cannot write {str(path)!r}: {error.strerror}. Name another file in --save."
