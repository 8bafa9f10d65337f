"""Random command lines: no traceback, no wrong exit code, no hang.

``python -m tests.fuzz.command_lines --number 2000 --seed 0`` runs them through the real
program, in worker processes, in a folder of models and plans under odd names.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import shlex
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer

from budgetfit.cli import app
from budgetfit.cli import main as budgetfit_main
from budgetfit.planning.trace_cache import CACHE_VARIABLE
from tests.fuzz.place import write_place, write_plans
from tests.fuzz.plan_files import quiet
from tests.fuzz.surroundings import HERE, draw_input, draw_variables
from tests.fuzz.words import NONSENSE, Verdict, draw
from tests.fuzz.workers import Outcome, default_jobs, report, run_all

if TYPE_CHECKING:
    from collections.abc import Iterator

FITS, ERROR, USAGE, DOES_NOT_FIT = 0, 1, 2, 3
ANY = frozenset({FITS, ERROR, USAGE, DOES_NOT_FIT})
# How a command ends whose words are right; the others answer that it does not fit.
ANSWERS = {
    "doctor": frozenset({FITS, ERROR}),  # error: it found a problem
    **dict.fromkeys(("explain", "info", "clear", "gpus", "layers"), frozenset({FITS})),
}
# These read what they are handed, or refuse it; nothing else may go wrong.
READERS = ("explain", "info", "clear", "gpus")
# How often each is drawn: planning has most words, and doctor most to wait for.
WEIGHTS = {
    "plan": 6,
    "estimate": 6,
    "export": 5,
    "explain": 5,
    **dict.fromkeys(("doctor", "cache", "gpus"), 1),
}
# Settings that may be right each and not together.
PAIRS = (
    ("batch_size", "effective_batch_size"),
    ("vram", "headroom"),
    ("max_length", "lengths"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A command line, and the exit codes that it may end with.

    Attributes:
        words: Those after the program's name.
        codes: The exit codes.
        given: What stands on standard input; None if it is closed.
        variables: Of the environment: what they are set to, None for removed ones.
    """

    words: tuple[str, ...]
    codes: frozenset[int]
    given: bytes | None = b""
    variables: tuple[tuple[str, str | None], ...] = ()

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.variables]
        text = shlex.join([*words, "budgetfit", *self.words])
        text = text if len(text) < 400 else f"{text[:400]}..."
        return f"{text} < {self.given!r:.200}" if self.given != b"" else text


def commands() -> dict[tuple[str, ...], Any]:
    """Return the real program's commands, those of groups included."""

    def inside(prefix: tuple[str, ...], command: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
        for name, inner in getattr(command, "commands", {}).items():
            if hasattr(inner, "commands"):
                yield from inside((*prefix, name), inner)
            else:
                yield (*prefix, name), inner

    return dict(inside((), typer.main.get_command(app)))


def make_line(rng: random.Random, known: dict[tuple[str, ...], Any]) -> Line:
    """Return a random command line, and what it finds around it."""
    names = sorted(known)
    [name] = rng.choices(names, [WEIGHTS.get(name[0], 3) for name in names])
    if rng.random() < 0.02:
        return Line((rng.choice([*NONSENSE, "plann", "Plan", "cache"]),), ANY)
    parts: list[list[str]] = []
    verdicts: dict[str, Verdict] = {}
    for parameter in known[name].params:
        drawn = _part(rng, name[-1], parameter)
        if drawn is not None:
            parts.append(drawn[0])
            verdicts[parameter.name] = drawn[1]
        elif parameter.required:
            verdicts[parameter.name] = "wrong"
    if rng.random() < 0.04:
        parts.append([rng.choice(NONSENSE)])
        verdicts["more"] = "open"
    if rng.random() < 0.04:
        other = rng.choice([*known[rng.choice(names)].params, *known[name].params])
        if other.param_type_name == "option" and other.opts:
            parts.append([max(other.opts, key=len), "x"])
            verdicts["more"] = "open"
    rng.shuffle(parts)
    words = (*name, *(word for part in parts for word in part))
    given: bytes | None = b""
    if "-" in words and name == ("explain",):
        given, verdicts["given"] = draw_input(rng)
    variables = draw_variables(rng, name)
    return Line(words, _codes(name[-1], verdicts, words), given, variables)


def _part(
    rng: random.Random,
    command: str,
    parameter: Any,  # noqa: ANN401
) -> tuple[list[str], Verdict] | None:
    """Return an argument's words, if it is given."""
    needed = parameter.required or parameter.name in ("gpu", "batch_size")
    given = rng.random() < (0.97 if needed else 0.12)
    if not given or parameter.name == "version":
        return None
    is_option = parameter.param_type_name == "option"
    if getattr(parameter, "is_flag", False):
        spelled = [*parameter.opts, *parameter.secondary_opts]
        return [rng.choice([word for word in spelled if word.strip()])], "right"
    text, verdict = draw(rng, command, parameter.name)
    if not is_option:
        return [text], "open" if text.startswith("-") else verdict
    if rng.random() < 0.3:
        return [f"{parameter.opts[0]}={text}"], verdict
    # Without a sign of equality a value with a dash may be read as an option.
    return [parameter.opts[0], text], "open" if text.startswith("-") else verdict


def _codes(
    command: str, verdicts: dict[str, Verdict], words: tuple[str, ...]
) -> frozenset[int]:
    """Return the exit codes that a line may end with."""
    codes = _codes_of_words(command, verdicts, words)
    return codes - {ERROR, DOES_NOT_FIT} if command in READERS else codes


def _codes_of_words(  # noqa: PLR0911 - one line for each rule
    command: str, verdicts: dict[str, Verdict], words: tuple[str, ...]
) -> frozenset[int]:
    if "--help" in words or "-h" in words or "more" in verdicts:
        return ANY
    if "wrong" in verdicts.values():
        # One open word more may be read so that the wrong one is never looked at.
        return ANY if "open" in verdicts.values() else frozenset({USAGE})
    if "open" in verdicts.values() or any(set(pair) <= set(verdicts) for pair in PAIRS):
        return ANY
    if command in ("plan", "estimate") and not {"gpu", "vram"} & set(verdicts):
        return ANY if torch.cuda.is_available() else frozenset({USAGE})
    if "method" not in verdicts and any("lora" in word for word in verdicts):
        return ANY  # refused, unless it is what it would be in any case
    if command == "verify" and "device" not in verdicts:
        return ANY
    return ANSWERS.get(command, frozenset({FITS, DOES_NOT_FIT}))


def run_line(line: Line) -> Outcome:
    """Run one line through ``budgetfit.cli.main``, as its own process would."""
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


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    content: bytes = stream.buffer.getvalue()  # type: ignore[attr-defined]
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
    if len(told) > 6000 and not long and "--traceback" not in line.words:
        return "an error as long as a page"
    return _json_fault(line, code, answer)


def _json_fault(line: Line, code: object, answer: str) -> str:
    if not _asks_for_json(line.words) or not answer.strip() or code == USAGE:
        return ""
    if "--help" in line.words or "-h" in line.words:
        return ""
    try:
        json.loads(answer, parse_constant=_no_number)
    except ValueError:
        return "--json printed no JSON document"
    return ""


def _asks_for_json(words: tuple[str, ...]) -> bool:
    """Whether ``--json`` is there, and not as the value of the option before it."""
    if "--json" not in words:
        return False
    before = words[words.index("--json") - 1]
    return "--" not in words and (not before.startswith("--") or before in _flags())


@functools.cache
def _flags() -> set[str]:
    parameters = [each for command in commands().values() for each in command.params]
    flags = [each for each in parameters if getattr(each, "is_flag", False)]
    return {word for each in flags for word in (*each.opts, *each.secondary_opts)}


def _no_number(text: str) -> float:
    raise ValueError(text)


def make_lines(number: int, seed: int) -> list[Line]:
    """Return random lines, the same ones for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    known = commands()
    return [make_line(rng, known) for _ in range(number)]


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
