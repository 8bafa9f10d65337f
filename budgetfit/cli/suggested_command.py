"""The ``budgetfit plan`` command to suggest after ``budgetfit estimate``."""

import shlex
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

import typer

from budgetfit.cli.options import LOOP

_CHOSEN_BY_PLAN: Final = ("batch_size", "checkpointing", "precision")
_OF_THE_ANSWER: Final = ("as_json", "traceback")


def plan_command(context: typer.Context) -> str:
    """Return the ``plan`` command with the options of an ``estimate`` command."""
    # A single ``precision`` is kept: a plan must not change the requested dtypes.
    left_out = [*_CHOSEN_BY_PLAN, *LOOP, *_OF_THE_ANSWER]
    if context.params.get("precision") not in (None, "as-is"):
        left_out.remove("precision")
    return shlex.join(["budgetfit", "plan", *_words(context, left_out)])


def _words(context: typer.Context, left_out: Container[str]) -> Iterator[str]:
    """Yield the model and the given options with their values."""
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        source = context.get_parameter_source(name)
        if name in left_out or source is None or source.name != "COMMANDLINE":
            continue
        if parameter.param_type_name == "argument":
            yield str(value)
        elif isinstance(value, bool):
            yield (parameter.opts if value else parameter.secondary_opts)[0]
        else:
            for each in value if isinstance(value, (list, tuple)) else [value]:
                yield from (parameter.opts[0], _text(each))


def _text(value: object) -> str:
    return str(value) if isinstance(value, (str, int, float, Path)) else repr(value)
