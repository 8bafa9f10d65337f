"""Random command lines: no traceback, no wrong exit code, no hang.

``python -m tests.fuzz.command_lines --number 2000 --seed 0`` runs them through the real
program, in worker processes, in a folder of models and plans under odd names.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from budgetfit.cli.app import main as budgetfit_main
from budgetfit.traces.cache.folder import CACHE_VARIABLE
from tests.fuzz.lines import ANY, ERROR, FITS, USAGE, Line, asks_for_json, make_lines
from tests.fuzz.place import write_place, write_plans
from tests.fuzz.plan_files import quiet
from tests.fuzz.surroundings import HERE
from tests.fuzz.workers import Outcome, default_jobs, report, run_all


def run_line(line: Line) -> Outcome:
    """Run one line through ``budgetfit.cli.app.main``, as its own process would."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    before = sys.argv, sys.stdin, sys.stdout, sys.stderr
    sys.argv, sys.stdout, sys.stderr = ["budgetfit", *line.words], out, err
    sys.stdin = None if line.given is None else io.TextIOWrapper(io.BytesIO(line.given))
    code: object = None
    trouble = ""
    try:
        with _around(line.variables):
            budgetfit_main()
    except SystemExit as error:
        code = error.code or 0
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        trouble = f"{type(error).__name__} reached the user"
        traceback.print_exc(limit=-6)
    finally:
        sys.argv, sys.stdin, sys.stdout, sys.stderr = before
    answer, told = (_written(stream) for stream in (out, err))
    fault = trouble or _fault(line, code, answer, told)
    return Outcome(str(line), str(code), fault, answer[-1500:] + told[-3000:])


@contextlib.contextmanager
def _around(variables: tuple[tuple[str, str | None], ...]) -> Iterator[None]:
    """Set variables of the environment for one line."""
    before = {name: os.environ.get(name) for name, _ in variables}
    try:
        _set(dict(variables))
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value.replace(HERE, str(Path.cwd()))


def _written(stream: Any) -> str:
    stream.flush()
    content: bytes = stream.buffer.getvalue()
    return content.decode("utf-8", errors="replace")


def _fault(  # noqa: PLR0911 - one line for each fault
    line: Line, code: object, answer: str, told: str
) -> str:
    """Say what is wrong with how a line ended; empty if nothing."""
    if code not in ANY:
        return f"exit code {code} is not documented"
    if "Add --traceback to see where it came from" in told:
        return "an error that nobody foresaw"
    if code not in line.codes:
        return f"exit code {code}, where it must be {sorted(line.codes)}"
    if "Traceback (most recent call last)" in told and "--traceback" not in line.words:
        return "a traceback without --traceback"
    if "Warning: " in told:
        return "a warning meant for programmers"
    told_otherwise = "Usage: " in answer or {"verify", "doctor"} & set(line.words)
    if code in (ERROR, USAGE) and not told.strip() and not told_otherwise:
        return "an error without a word"
    if code == FITS and not answer.strip() and "--save" not in str(line):
        return "no answer"
    long = any(len(word) > 1000 for word in line.words)
    long = long or any(name == "FORCE_COLOR" for name, _ in line.variables)  # progress
    if len(told) > 6000 and not long and "--traceback" not in line.words:
        return "an error as long as a page"
    return _json_fault(line, code, answer)


def _json_fault(line: Line, code: object, answer: str) -> str:
    if not asks_for_json(line.words) or not answer.strip() or code == USAGE:
        return ""
    if "--help" in line.words or "-h" in line.words:
        return ""
    try:
        json.loads(answer, parse_constant=_no_number)
    except ValueError:
        return "--json printed no JSON document"
    return ""


def _no_number(text: str) -> float:
    raise ValueError(text)


def main() -> int:
    """Run what the command line asks for; return the number of faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    asked = parser.parse_args()
    warnings.simplefilter("default")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        os.environ[CACHE_VARIABLE] = str(Path(name) / "traces of lines")
        folder = Path(name) / "place"
        folder.mkdir()
        with quiet():
            write_plans(write_place(folder))
        os.chdir(folder)
        lines = make_lines(asked.number, asked.seed)
        return report(run_all(lines, run_line, jobs=asked.jobs), asked.number)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
