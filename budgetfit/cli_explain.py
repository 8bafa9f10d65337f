"""``budgetfit explain``: what an out-of-memory message means."""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from budgetfit import cli_options as options
from budgetfit.cli_answers import answering
from budgetfit.core.errors import InputError

_LONGEST_BYTES: Final = 8 * 2**20  # the end of a log is where it failed

Source = Annotated[
    str,
    typer.Argument(
        help="File with the message, a traceback or a whole log; - for standard input.",
        metavar="OOM.txt",
    ),
]


def explain(
    source: Source,
    *,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """Read an out-of-memory message: what was to blame, what to change."""
    with answering(as_json=as_json, traceback=traceback):
        module = importlib.import_module("budgetfit.explain.explain")
        found = module.explain(_read(source))
        if as_json:
            json = importlib.import_module("budgetfit.reporting.json")
            typer.echo(json.explanation_json(found))
        else:
            text = importlib.import_module("budgetfit.reporting.text")
            text.show(text.explain_text(found))


def _read(source: str) -> str:
    if source == "-":
        return _decoded(sys.stdin.buffer.read()[-_LONGEST_BYTES:])
    try:
        with Path(source).open("rb") as file:
            size_bytes = file.seek(0, 2)
            start = max(0, size_bytes - _LONGEST_BYTES)
            file.seek(0)
            mark = file.read(2)
            file.seek(start)
            data = file.read()
            return _decoded(mark + data if start else data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"Cannot read {source!r}: {reason}. Hand in a file with the message, for "
            "example: python train.py 2>&1 | tee oom.txt; budgetfit explain oom.txt"
        ) from None


def _decoded(data: bytes) -> str:
    """Return text from a file of any shell; PowerShell's ``>`` writes UTF-16."""
    if data[:2] in {b"\xff\xfe", b"\xfe\xff"}:
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8", errors="replace")
