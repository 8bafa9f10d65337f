"""``budgetfit doctor``: whether this installation can train."""

import importlib

import typer

from budgetfit.cli import options
from budgetfit.cli.output import ERROR, answering, in_json, in_text, working


def doctor(
    *,
    gpu: options.Gpu = None,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """Check torch, driver, card and libraries, and say what to do."""
    with answering(as_json=as_json, traceback=traceback):
        with working():
            module = importlib.import_module("budgetfit.doctor.checks")
            findings = module.check_up(gpu)
        if as_json:
            typer.echo(in_json().check_up_json(findings))
        else:
            in_text().show(in_text().doctor_text(findings))
        if any(finding.verdict == "problem" for finding in findings):
            raise typer.Exit(ERROR)
