"""``budgetfit doctor``: diagnose this installation."""

import importlib

import typer

from budgetfit.cli import options
from budgetfit.cli.output import (
    ERROR,
    json_writer,
    report_errors,
    show_progress,
    text_writer,
)


def doctor(
    *,
    gpu: options.Gpu = None,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """Check torch, driver, card and libraries, and say what to do."""
    with report_errors(as_json=as_json, traceback=traceback):
        with show_progress():
            module = importlib.import_module("budgetfit.doctor.checks")
            findings = module.check_installation(gpu)
        if as_json:
            typer.echo(json_writer().findings_json(findings))
        else:
            text_writer().show(text_writer().doctor_text(findings))
        if any(finding.verdict == "problem" for finding in findings):
            raise typer.Exit(ERROR)
