"""Help that is plain, and words for common options that there are not."""

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import typer.main
from click.testing import Result

from budgetfit.cli.app import app
from budgetfit.cli.unsupported_options import UNSUPPORTED_OPTIONS
from tests.cli.fake_api import FakeApi


def commands() -> list[tuple[str, Any]]:
    """Return each command with the words that call it."""
    found = []
    for name, command in vars(typer.main.get_command(app))["commands"].items():
        if hasattr(command, "commands"):
            found += [(f"{name} {sub}", one) for sub, one in command.commands.items()]
        else:
            found.append((name, command))
    return found


NAMES = [name for name, _ in commands()]


@pytest.mark.parametrize("name", ["", "cache", *NAMES])
def test_help_has_no_type_behind_flags_and_no_braces(
    run: Callable[..., Result], name: str
) -> None:
    text = run(*name.split(), "--help").stdout
    assert "<bool>" not in text
    assert not re.search(r"[{}]", text)


@pytest.mark.parametrize(("name", "command"), commands(), ids=NAMES)
def test_help_ends_with_an_example_that_the_command_understands(
    run: Callable[..., Result], name: str, command: Any
) -> None:
    last = run(*name.split(), "--help").stdout.strip().splitlines()[-1].strip()
    start, _, rest = last.partition(f"budgetfit {name}")
    assert start == "Example: "
    command.make_context(name, shlex.split(rest))  # an option that is none is refused


@pytest.mark.parametrize("option", UNSUPPORTED_OPTIONS)
def test_an_option_that_there_is_not_gets_one_line_that_says_what_to_do(
    run: Callable[..., Result], api: FakeApi, option: str
) -> None:
    for words in (["plan", "org/name", option, "2"], ["plan", "org/name", option]):
        result = run(*words)

        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr == f"Error: {option}: {UNSUPPORTED_OPTIONS[option]}.\n"
    assert api.calls == []


@pytest.mark.parametrize("word", ["--devices=2", "--num_gpus", "--seq_len=512"])
def test_it_is_known_with_a_value_and_with_underscores(
    run: Callable[..., Result], word: str
) -> None:
    result = run("plan", "org/name", word)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --")
    assert "No such option" not in result.stderr


def test_it_is_a_document_with_json(run: Callable[..., Result]) -> None:
    result = run("plan", "org/name", "--fsdp", "--json")
    assert json.loads(result.stdout)["error"]["type"] == "InputError"


def test_an_option_that_the_command_has_is_its_own(
    run: Callable[..., Result], api: FakeApi
) -> None:
    result = run("compare", "org/name", "--gpus", "t4,l4")
    assert result.exit_code == 0, result.output
    assert api.calls[0][0] == "compare"


def test_any_other_option_is_unknown(run: Callable[..., Result]) -> None:
    assert "No such option: --cards" in run("plan", "org/name", "--cards").stderr


def test_what_is_advised_exists() -> None:
    of_plan, of_estimate = (
        {word for param in dict(commands())[name].params for word in param.opts}
        for name in ("plan", "estimate")
    )
    assert not of_plan & set(UNSUPPORTED_OPTIONS)
    for text in UNSUPPORTED_OPTIONS.values():
        advised = set(re.findall(r"--[a-z0-9-]+", text))
        assert advised <= of_plan, text
        assert advised <= of_estimate or text.startswith("use plan "), text
