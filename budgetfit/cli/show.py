"""``budgetfit show``: print a saved plan."""

import typer

from budgetfit.cli import options
from budgetfit.cli.output import json_writer, report_errors, text_writer
from budgetfit.core.validation import check_samples


def show(
    plan_file: options.PlanFile,
    *,
    samples: options.Samples = None,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """Print a saved plan as it was printed when it was made."""
    with report_errors(as_json=as_json, traceback=traceback):
        from budgetfit.core.plan import Plan  # noqa: PLC0415 - keeps --help fast

        check_samples(samples)
        made = Plan.load(plan_file)
        if as_json:
            typer.echo(json_writer().plan_json(made, samples))
        else:
            text_writer().print_plan(made, saved_as=str(plan_file), samples=samples)
