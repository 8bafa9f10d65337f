"""Every error says more than what is wrong: it says what to do about it.

Read from the source, so that a new error is held to it before anybody meets it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import budgetfit

SOURCE = Path(budgetfit.__file__).parent
ERRORS = {"BudgetfitError", "InputError", "TraceError"}
# What a text tells to do, or shows how it is done.
ADVICE = re.compile(
    r"\b(add|allow|build|fetch|make|call|check|correct|give|hand|install|leave|load|look|name|"
    r"pad|pass|plan again|plan anew|put|remove|run|save|say|set|show|train|try|undo|"
    r"unfreeze|use|verify|wait|write)\b|for example|such as|nearest|its blocks|"
    # Or what the right form is.
    r"must be|needs at least|cannot be negative|next smaller one|instead",
    re.IGNORECASE,
)


def texts() -> Iterator[tuple[str, str]]:
    """Yield place and literal text of each error that is written where it is raised.

    What is put in (names, sizes, a text that a function returns) is left blank.
    """
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ERRORS
                and node.args
            ):
                text = literal(node.args[0])
                if text.strip():
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", text


def literal(node: ast.AST) -> str:
    """Return the constant parts of an expression, with a blank for each other part.

    A name in capitals is an example or an advice that several texts share.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(literal, node.values))
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        shared = {"_ALONE", "_ANEW", "EXAMPLES", "FACTORY_EXAMPLE", "use", "hint"}
        shared |= {"_EXAMPLE", "instead", "_ELSE", "_USE"}
        return "for example" if node.value.id in shared else " "
    return " "


def test_there_are_errors_to_read() -> None:
    assert len(list(texts())) > 100


def test_an_error_tells_what_to_do() -> None:
    silent = [f"{place}: {text}" for place, text in texts() if not ADVICE.search(text)]
    assert silent == []


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ('f"{x!r} is bad. " "Use y."', "  is bad. Use y."),
        ('"a" + f"{_EXAMPLE}"', "afor example"),
        ("_unknown(name)", " "),
    ],
)
def test_what_is_literal_is_read(source: str, wanted: str) -> None:
    assert literal(ast.parse(source, mode="eval").body).split() == wanted.split()
