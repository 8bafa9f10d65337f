"""Output streams, error messages and exit codes of the commands.

Results go to stdout, progress and errors to stderr. No traceback without --traceback.
"""

import codecs
import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
import traceback as tracebacks
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import typer

from budgetfit.cli.error_wording import with_option_names
from budgetfit.errors import BudgetfitError, DoesNotFitError, InputError
from budgetfit.utils.whole_file import write_whole

ERROR: Final = 1
USAGE: Final = 2
DOES_NOT_FIT: Final = 3
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

_OTHER_FORMATS: Final = {".pdf", ".png", ".svg", ".md", ".txt", ".json", ".ipynb"}
_WIDTHS: Final = range(20, 10_000)  # plausible terminal widths

Progress = Callable[[str], None]


def ignore_odd_width() -> None:
    """Drop an implausible COLUMNS, so that rich detects the width or takes 80."""
    # With COLUMNS=0, as of pseudo-terminals without a size, rich prints usage errors in
    # no columns at all.
    columns = os.environ.get("COLUMNS", "")[:10]
    if not (columns.isdecimal() and int(columns) in _WIDTHS):
        os.environ.pop("COLUMNS", None)


def readable_errors() -> str:
    """Return an error handler's name for characters that a stream cannot encode."""
    # Bytes of file names that are no text here are written as they are, so that
    # commands can be pasted; other characters become backslash escapes.

    def encoded(error: UnicodeError) -> tuple[str | bytes, int]:
        try:
            return codecs.lookup_error("surrogateescape")(error)
        except UnicodeError:
            return codecs.lookup_error("backslashreplace")(error)

    codecs.register_error("budgetfit.readable", encoded)
    return "budgetfit.readable"


@contextlib.contextmanager
def report_errors(
    *, as_json: bool, traceback: bool, vram: str | None = None, save: Path | None = None
) -> Iterator[None]:
    """Print an error as one message and exit with its code.

    Under torchrun the first process of each machine prints those of the arguments.
    ``vram`` is the limit as typed: its meaning in bytes is printed where nothing fits.
    ``save`` is checked to be writable before the work starts.
    """
    try:
        if save is not None:
            check_writable(save)
        yield
    except (typer.Exit, BrokenPipeError):
        raise  # already handled; a closed pipe (typer ends quietly)
    except Exception as error:  # noqa: BLE001 - users get a message, not a traceback
        if traceback:
            tracebacks.print_exc()
        # What is wrong with the arguments is so for all processes of torchrun.
        if isinstance(error, InputError) and os.environ.get("LOCAL_RANK", "0") != "0":
            raise typer.Exit(_exit_code(error)) from None
        if as_json:
            with contextlib.suppress(OSError):  # stdout itself: told on stderr
                typer.echo(json_writer().error_json(error))
        # DoesNotFitError is a result, for stdout; anything else is an error.
        answer = isinstance(error, DoesNotFitError) and not as_json
        if answer and vram is not None:
            _echo_limit(vram)
        typer.echo(with_option_names(_message(error)), err=not answer)
        raise typer.Exit(_exit_code(error)) from None


def _echo_limit(vram: str) -> None:
    from budgetfit.core.units import parse_bytes
    from budgetfit.reporting.formatting import memory_class_text, size_text

    size_bytes = parse_bytes(vram)
    for line in (size_text(size_bytes), memory_class_text(size_bytes)):
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
    """Exit with code 3 where the settings do not fit."""
    if not fits:
        raise typer.Exit(DOES_NOT_FIT)


@contextlib.contextmanager
def show_progress() -> Iterator[Progress | None]:
    """Show progress on stderr, only on a terminal."""
    # What the model's own code prints goes to stderr, too: stdout is for the result.
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with contextlib.redirect_stdout(sys.stderr):
        # FORCE_COLOR, as CI sets it, makes rich take a log file for a terminal.
        if not (console.is_terminal and console.file.isatty()):
            yield None
            return
        with console.status(Text("Loading torch")) as status:
            yield lambda text: status.update(Text(text))


def api() -> ModuleType:
    """Import ``budgetfit.api.plan``."""
    return import_or_exit("budgetfit.api.plan")


def import_or_exit(name: str) -> ModuleType:
    """Import a module that imports torch; Ctrl-C exits immediately meanwhile."""
    # C extensions swallow a KeyboardInterrupt during their import and fail later with
    # an unrelated error.
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
        os.write(
            sys.stderr.fileno(), b"\r\x1b[K\x1b[?25h"
        )  # restores what ``show_progress`` hides
    os._exit(INTERRUPTED)


def text_writer() -> ModuleType:
    """Import the text reports."""
    return importlib.import_module("budgetfit.reporting.render")


def json_writer() -> ModuleType:
    """Import the JSON reports."""
    return importlib.import_module("budgetfit.reporting.json")


def exit_if_not_saved(trouble: str) -> None:
    """Exit with code 1, after the output, where a file could not be written."""
    if trouble:
        typer.echo(f"Error: {trouble}", err=True)
        raise typer.Exit(ERROR)


def check_writable(path: Path) -> None:
    """Check that a file can be written; an existing one is not changed."""
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
        elif place.is_file() and not os.access(place.parent, os.W_OK):
            # A new file takes its place.
            raise PermissionError(errno.EACCES, "its folder cannot be written to")
    except OSError as error:
        raise InputError(_cannot_write(path, error)) from None


def write(path: Path | None, text: str) -> str:
    """Write a file, if given; return why it failed, or an empty text."""
    if path is not None:
        try:
            write_whole(path, text)
        except OSError as error:
            return _cannot_write(path, error)
    return ""


def check_report(path: Path | None) -> None:
    """Check that a report can be drawn and written, if one is asked for."""
    if path is not None:
        if path.suffix.lower() in _OTHER_FORMATS:
            raise InputError(
                f"A report is one HTML file, and {str(path)!r} has another ending. "
                "Write --report plan.html; a browser prints it as PDF."
            )
        report_writer().check_libraries()
        check_writable(path)


def write_report(path: Path | None, page: str, *shown: object) -> str:
    """Write a report, made by ``page``, if asked for; return why it failed, or ""."""
    if path is None:
        return ""
    with show_progress() as progress:
        if progress is not None:
            progress("drawing the report")
        text = getattr(report_writer(), page)(*shown)
    return write(path, text)


def write_snapshot(path: Path | None, dump: Callable[[Path], None]) -> str:
    """Write a memory snapshot, if asked for; return as ``write_report``."""
    if path is not None:
        try:
            dump(path)
        except OSError as error:
            return _cannot_write(path, error)
    return ""


def report_writer() -> ModuleType:
    """Import the report with figures."""
    return importlib.import_module("budgetfit.reporting.html.report")


def _cannot_write(path: Path, error: OSError) -> str:
    return f"Cannot write {str(path)!r}: {error.strerror}. Name another file."
