"""Random command lines of the real program, and how each may end."""

import functools
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import typer

from budgetfit.cli.app import app
from tests.fuzz.surroundings import draw_input, draw_variables
from tests.fuzz.words import NONSENSE, Verdict, draw

FITS, ERROR, USAGE, DOES_NOT_FIT = 0, 1, 2, 3
ANY = frozenset({FITS, ERROR, USAGE, DOES_NOT_FIT})
# How a command ends whose words are right; the others answer that it does not fit.
ANSWERS = {
    "doctor": frozenset({FITS, ERROR}),  # error: it found a problem
    "check": frozenset({FITS, USAGE, DOES_NOT_FIT}),  # a card that cannot run a plan
    **dict.fromkeys(
        ("explain", "info", "clear", "gpus", "layers", "show"), frozenset({FITS})
    ),
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
    ("method", "methods"),
    ("precision", "optimizer_in_backward"),
)
# Settings of adapters, beside those with "lora" in their names.
OF_ADAPTERS = (
    "quantization",
    "double_quantization",
    "prepare_for_kbit",
    "target_modules",
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

    def inside(prefix: tuple[str, ...], command: object) -> Iterator[tuple[Any, Any]]:
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
    rng: random.Random, command: str, parameter: Any
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
    of_adapters = any("lora" in word or word in OF_ADAPTERS for word in verdicts)
    needs_method = of_adapters and "method" not in verdicts
    if needs_method or ("engine" in verdicts and "gpus" not in verdicts):
        return ANY  # refused, unless it is what it would be in any case
    if command == "verify" and "device" not in verdicts:
        return ANY
    return ANSWERS.get(command, frozenset({FITS, DOES_NOT_FIT}))


def make_lines(number: int, seed: int) -> list[Line]:
    """Return random lines, the same ones for the same seed."""
    rng = random.Random(seed)
    known = commands()
    return [make_line(rng, known) for _ in range(number)]


def asks_for_json(words: tuple[str, ...]) -> bool:
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
