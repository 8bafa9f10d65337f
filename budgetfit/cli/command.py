"""Register a command with groups of options, and report its errors."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from budgetfit.cli.options import OUTPUT, Options
from budgetfit.cli.output import report_errors
from budgetfit.cli.unsupported_options import Command

Body = TypeVar("Body", bound=Callable[..., None])


def command(app: typer.Typer, *groups: Options, example: str) -> Callable[[Body], Body]:
    """Register a function as the command of its name; its docstring is the help.

    It is called with the values of the options by name, comma lists split. ``groups``:
    its arguments and options, in the order of the help; ``--json`` and ``--traceback``
    are of every command. ``example`` is shown below them, without the program's name.
    """
    declared = {
        name: each for group in (*groups, OUTPUT) for name, each in group.items()
    }

    def register(body: Body) -> Body:
        def run(**given: Any) -> None:
            with report_errors(
                as_json=given["as_json"],
                traceback=given.pop("traceback"),
                vram=given.get("vram"),
                save=given.get("save"),
            ):
                for name, value in given.items():
                    split = declared[name].split
                    if split is not None and value is not None:
                        given[name] = split(value)
                body(**given)

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=each.default,
                    annotation=Annotated[each.kind, each.info],
                )
                for name, each in declared.items()
            ]
        )
        app.command(
            body.__name__,
            cls=Command,
            help=body.__doc__,
            epilog=f"Example: budgetfit {example}",
        )(run)
        return body

    return register
