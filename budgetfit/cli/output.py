"""Where a command's answer, progress and errors go, and the exit codes.

stdout carries the answer, stderr progress and errors. No traceback without --traceback.
"""

import contextlib
import importlib
import os
import signal
import sys
import threading
import traceback as tracebacks
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import typer

from budgetfit.cli.save import check_writable
from budgetfit.errors import BudgetfitError, DoesNotFitError, InputError

ERROR: Final = 1
USAGE: Final = 2
DOES_NOT_FIT: Final = 3
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

_WIDTHS: Final = range(20, 10_000)  # of terminals that can be read

Progress = Callable[[str], None]


def ignore_odd_width() -> None:
    """Let rich find the terminal's width, or take 80, where COLUMNS is of no use.

    Where it is 0, as pseudo-terminals without a size say, rich prints a mistake of
    usage in no column at all.
    """
    columns = os.environ.get("COLUMNS", "")[:10]
    if not (columns.isdecimal() and int(columns) in _WIDTHS):
        os.environ.pop("COLUMNS", None)


@contextlib.contextmanager
def answering(
    *,
    as_json: bool,
    traceback: bool,
    vram: str | None = None,
    save: Path | None = None,
) -> Iterator[None]:
    """Turn an error into one message and the exit code that it stands for.

    ``vram`` is the limit as it was typed: that it does not fit is told with what the
    text meant (interface section 5). That ``save`` cannot be written is told before
    the work for it.
    """
    try:
        if save is not None:
            check_writable(save)
        yield
    except (typer.Exit, BrokenPipeError):
        raise  # an answer already; a reader that has gone (typer ends quietly)
    except Exception as error:  # noqa: BLE001 - a user gets a line, not a traceback
        if traceback:
            tracebacks.print_exc()
        if as_json:
            typer.echo(in_json().error_json(error))
        # That it does not fit is the answer; anything else is an error.
        answer = isinstance(error, DoesNotFitError) and not as_json
        if answer and vram is not None:
            _echo_limit(vram)
        typer.echo(_as_options(_message(error)), err=not answer)
        raise typer.Exit(_exit_code(error)) from None


def _as_options(text: str) -> str:
    from budgetfit.cli.error_wording import in_options  # noqa: PLC0415 - for errors only

    cli = importlib.import_module("budgetfit.cli.app")  # which imports this module
    return in_options(text, cli.app)


def _echo_limit(vram: str) -> None:
    from budgetfit.core.units import parse_bytes  # noqa: PLC0415 - keeps --help fast
    from budgetfit.reporting.phrases import class_text, size_text  # noqa: PLC0415

    size_bytes = parse_bytes(vram)
    for line in (size_text(size_bytes), class_text(size_bytes)):
        if line is not None:
            typer.echo(line)


def _message(error: Exception) -> str:
    if isinstance(error, DoesNotFitError):
        return error.text(as_options=True)
    if isinstance(error, BudgetfitError):
        return f"Error: {error}"
    return (
        f"Error: {type(error).__name__}: {error}\n"
        "Add --traceback to see where it came from."
    )


def _exit_code(error: Exception) -> int:
    if isinstance(error, DoesNotFitError):
        return DOES_NOT_FIT
    return USAGE if isinstance(error, InputError) else ERROR


def exit_unless_fits(*, fits: bool) -> None:
    """End with exit code 3 where the answer is that it does not fit."""
    if not fits:
        raise typer.Exit(DOES_NOT_FIT)


@contextlib.contextmanager
def working() -> Iterator[Progress | None]:
    """Show what is being done, on stderr and only where somebody watches.

    What a model's own code prints goes to stderr too: stdout is for the answer.
    """
    from rich.console import Console  # noqa: PLC0415 - keeps --help fast
    from rich.text import Text  # noqa: PLC0415

    console = Console(stderr=True)
    with contextlib.redirect_stdout(sys.stderr):
        if not console.is_terminal:
            yield None
            return
        with console.status(Text("Loading torch")) as status:
            yield lambda text: status.update(Text(text))


def api() -> Any:  # noqa: ANN401 - modules, imported late: --help is to answer at once
    """Return what does the work."""
    return load("budgetfit.api.plan")


def load(name: str) -> ModuleType:
    """Import what imports torch; Ctrl-C ends the program there and then.

    Modules written in C swallow an interruption of their import, and fail later with
    an error that says nothing of it.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        return importlib.import_module(name)
    signal.signal(signal.SIGINT, _end_now)
    try:
        return importlib.import_module(name)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_now(*_: object) -> None:
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        os.write(sys.stderr.fileno(), b"\r\x1b[K\x1b[?25h")  # what ``working`` hides
    os._exit(INTERRUPTED)


def in_text() -> Any:  # noqa: ANN401
    """Return what writes answers for people."""
    return importlib.import_module("budgetfit.reporting.render")


def in_json() -> Any:  # noqa: ANN401
    """Return what writes answers for programs."""
    return importlib.import_module("budgetfit.reporting.json")


def exit_if_lost(trouble: str) -> None:
    """End with exit code 1, after the answer, where a file could not be written."""
    if trouble:
        typer.echo(f"Error: {trouble}", err=True)
        raise typer.Exit(ERROR)
