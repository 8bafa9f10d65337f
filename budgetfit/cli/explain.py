"""``budgetfit explain``: explain an out-of-memory message."""

import errno
import importlib
import sys
from pathlib import Path
from typing import BinaryIO, Final

import typer

from budgetfit.cli.output import json_writer, text_writer
from budgetfit.errors import InputError

_LONGEST_BYTES: Final = 8 * 2**20  # read only the end of longer logs


def explain(*, source: str, as_json: bool) -> None:
    """Read an out-of-memory message: what was to blame, what to change."""
    module = importlib.import_module("budgetfit.explain.explain")
    found = module.explain(_read(source))
    if as_json:
        typer.echo(json_writer().explanation_json(found))
    else:
        text_writer().show(text_writer().explain_text(found))


def _read(source: str) -> str:
    try:
        if source == "-":
            if sys.stdin is None:
                raise OSError(errno.EBADF, "it is closed")  # noqa: TRY301 - as any other
            return _decoded(_end(sys.stdin.buffer))
        with Path(source).open("rb") as file:
            return _decoded(_end(file))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        name = "standard input" if source == "-" else repr(source)
        raise InputError(
            f"Cannot read {name}: {reason}. Hand in a file with the message, for "
            "example: python train.py 2>&1 | tee oom.txt; budgetfit explain oom.txt"
        ) from None


def _end(stream: BinaryIO) -> bytes:
    """Return the end of a stream, preceded by the first two bytes if it is longer."""
    # Those may be a UTF-16 byte order mark. A pipe, ``explain <(python train.py
    # 2>&1)``, is read in parts without keeping all of it.
    mark = stream.read(2)
    if stream.seekable():
        stream.seek(max(stream.tell(), stream.seek(0, 2) - _LONGEST_BYTES))
    data = b""
    while piece := stream.read(_LONGEST_BYTES):
        # UTF-16 characters start at even offsets; both lengths are even.
        data = (data + piece)[-_LONGEST_BYTES:]
    return mark + data


def _decoded(data: bytes) -> str:
    """Decode UTF-8 or UTF-16, which PowerShell's ``>`` writes."""
    if data[:2] in {b"\xff\xfe", b"\xfe\xff"}:
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8", errors="replace")
