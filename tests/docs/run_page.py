"""Run the blocks of a page, in their order and in one namespace."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from budgetfit import BudgetfitError
from budgetfit.cli.app import app
from tests.docs.markdown import ROOT, Block, blocks
from tests.docs.shown import is_shown
from tests.docs.stand_ins import full_config

# What a line of a shell block may begin with, beside `budgetfit`, which is run.
PROMPT = "$ "


class PageError(AssertionError):
    """A page says what is not so; the text begins with the page and the line."""


def run_page(page: str, names: dict[str, Any]) -> None:
    """Run every block of ``page``; what ``python`` blocks define stays for the next.

    Raises:
        PageError: A block fails, shows what is not printed, or names what is not there.
    """
    printed: str | None = None
    for block in blocks(page):
        if block.not_run:
            printed = None
        elif block.language == "python":
            printed = _python(block, names)
        elif block.language == "text":
            _compare_with_python(block, printed)
        elif block.language in _OTHERS:
            _OTHERS[block.language](block)
        else:
            raise PageError(
                f"{block.where}: say what the block is, one of python, text, "
                f"{', '.join(_OTHERS)}; got {block.language!r}"
            )


def _python(block: Block, names: dict[str, Any]) -> str:
    """Run a block; return what it printed, or the message of budgetfit's own error."""
    code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(code, names)
    except BudgetfitError as error:
        if not block.comment.startswith("raises"):
            raise PageError(f"{block.where}: {error}") from error
        return out.getvalue() + str(error)
    except Exception as error:
        raise PageError(f"{block.where}: {error!r}") from error
    return out.getvalue()


def _compare_with_python(block: Block, printed: str | None) -> None:
    if printed is None:
        raise PageError(
            f"{block.where}: a text block shows what the python block before it prints;"
            " of other text say <!-- not run: the reason -->"
        )
    _compare(block, block.text, printed)


def _compare(block: Block, shown: str, printed: str) -> None:
    if not is_shown(shown, printed):
        raise PageError(
            f"{block.where} shows:\n{shown}\nbut what is printed is:\n{printed}"
        )


def _console(block: Block) -> None:
    """Run commands, each of which may be followed by what it prints.

    They run beside the published configs, at full size.
    """
    for command, shown in commands(block):
        printed = print_of(block, command, fails=bool(shown))
        if shown:
            _compare(block, shown, printed)


def print_of(block: Block, command: str, *, fails: bool = False) -> str:
    """Return what a command prints where configs have their full size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(transformers.AutoConfig, "from_pretrained", full_config)
        return _budgetfit(block, command, fails=fails)


def commands(block: Block) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with what is shown of its print."""
    found: list[list[str]] = []
    for line in block.text.splitlines():
        if found and found[-1][-1].endswith("\\") and len(found[-1]) == 1:
            found[-1][0] += f"\n{line}"
        elif line.startswith(PROMPT):
            found.append([line.removeprefix(PROMPT)])
        elif not found:
            raise PageError(f"{block.where}: a console block begins with {PROMPT!r}")
        else:
            found[-1].append(line)
    return [(command, "\n".join(shown)) for command, *shown in found]


def _shell(block: Block) -> None:
    """Run the budgetfit commands of a block; of others, look for what they name."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "budgetfit":
            _budgetfit(block, line)
        elif words[0] == "make":
            _check_target(block, words[1])
        elif words[0] == "python":
            _check_program(block, words[1:])
        elif words[:2] != ["pip", "install"]:
            raise PageError(f"{block.where}: cannot run {line!r}")


def _budgetfit(block: Block, line: str, *, fails: bool = False) -> str:
    """Run a command of ours, ``> file`` included; return its answer, or its error."""
    words = shlex.split(line.replace("\\\n", " "), comments=True)[1:]
    to_file = words[words.index(">") + 1] if ">" in words else None
    words = words[: words.index(">")] if to_file else words
    done = CliRunner().invoke(app, words)
    if done.exit_code and not fails:
        raise PageError(
            f"{block.where}: {line!r} ends with {done.exit_code}:\n{done.output}"
        ) from done.exception
    if to_file:
        Path(to_file).write_text(done.stdout, encoding="utf-8")
    return done.stdout or done.output


def _check_target(block: Block, target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE):
        raise PageError(f"{block.where}: there is no `make {target}`")


def _check_program(block: Block, words: list[str]) -> None:
    there = (
        importlib.util.find_spec(words[1]) is not None
        if words[0] == "-m"
        else (ROOT / words[0]).is_file()
    )
    if not there:
        raise PageError(f"{block.where}: there is no program {' '.join(words)}")


def _json(block: Block) -> None:
    _parse(block, json.loads)


def _toml(block: Block) -> None:
    _parse(block, tomllib.loads)


def _parse(block: Block, parse: Any) -> None:
    try:
        parse(block.text)
    except ValueError as error:
        raise PageError(f"{block.where}: {error}") from error


_OTHERS = {"console": _console, "sh": _shell, "json": _json, "toml": _toml}
