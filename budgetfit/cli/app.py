"""The ``budgetfit`` typer app: parse options, call the api, print its reports.

Output streams and exit codes are in ``cli.output``. Modules that need torch are
imported inside the commands, so that ``--help`` and ``gpus`` start fast.
"""

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from budgetfit.cli import cache
from budgetfit.cli.answer_key import answers_are_kept
from budgetfit.cli.command import command
from budgetfit.cli.error_wording import (
    estimate_with_option_names,
    plan_with_option_names,
    rows_with_option_names,
)
from budgetfit.cli.explain import explain
from budgetfit.cli.options import (
    ADAPTERS,
    BATCH,
    CARD,
    CARDS,
    CHECKED_CARD,
    CONTEXT,
    DETAILS,
    DOCTORED_CARD,
    EXPORT,
    HOW_MANY_GPUS,
    LENGTHS,
    LOOP,
    METHODS,
    MODEL,
    OOM_FILE,
    OTHER_MODEL,
    PLAN_FILE,
    PLAN_OUTPUT,
    PRICES,
    REAL_STEPS,
    REMOTE_CODE,
    REPORT,
    RESERVED,
    SAMPLES,
    SEARCH,
    SETTINGS,
    SETTINGS_AS_THEY_ARE,
    SEVERAL_GPUS,
    only,
)
from budgetfit.cli.output import (
    ERROR,
    INTERRUPTED,
    api,
    check_report,
    check_writable,
    exit_if_not_saved,
    exit_unless_fits,
    ignore_odd_width,
    import_or_exit,
    json_writer,
    readable_errors,
    show_progress,
    text_writer,
    write,
    write_report,
    write_snapshot,
)
from budgetfit.cli.parsing import arguments_of
from budgetfit.cli.quiet_libraries import quiet_libraries
from budgetfit.cli.suggested_command import plan_command
from budgetfit.cli.unsupported_options import Group
from budgetfit.core.loop import KINDS, Loop
from budgetfit.core.validation import check_samples
from budgetfit.errors import InputError
from budgetfit.utils.garbage_collection import (
    collect_less_often,
    collect_nothing_at_exit,
)

if TYPE_CHECKING:
    from budgetfit.core.plan import Plan

# Targets of `export --to`, and the modules whose `export_text` writes them.
EXPORTS: Final = {
    "trainer": "budgetfit.integrations.exports.trainer",
    "sft": "budgetfit.integrations.exports.trl",
    "dpo": "budgetfit.integrations.exports.trl_dpo",
    "accelerate": "budgetfit.integrations.exports.accelerate",
    "lightning": "budgetfit.integrations.exports.lightning",
    "deepspeed": "budgetfit.integrations.exports.deepspeed",
    "llamafactory": "budgetfit.integrations.exports.llamafactory",
    "axolotl": "budgetfit.integrations.exports.axolotl",
    "torch": "budgetfit.integrations.source_code.plain_torch",
}

app = typer.Typer(
    name="budgetfit",
    cls=Group,
    help="Training settings that fit a VRAM budget: planned without a GPU, "
    "proven with real steps.",
    epilog="Example: budgetfit plan HuggingFaceTB/SmolLM2-1.7B --gpu rtx-4090",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; the entry point of ``budgetfit``."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=readable_errors())
    ignore_odd_width()
    collect_less_often()
    collect_nothing_at_exit()
    try:
        with answers_are_kept(), quiet_libraries():
            app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _print_version(asked: bool) -> None:
    if asked:
        try:
            version = importlib.metadata.version("budgetfit")
        except importlib.metadata.PackageNotFoundError:
            version = "(run from its source, not installed)"
        typer.echo(f"budgetfit {version}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Take what stands before a command."""


@command(
    app,
    *(MODEL, CARD, HOW_MANY_GPUS, RESERVED, BATCH, LENGTHS, SETTINGS, SEARCH, ADAPTERS),
    *(REMOTE_CODE, SAMPLES, DETAILS, PLAN_OUTPUT),
    example="plan HuggingFaceTB/SmolLM2-1.7B --gpu rtx-4090",
)
def plan(
    *,
    samples: int | None,
    why: str | None,
    save: Path | None,
    report: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Find the fastest training settings that fit; no GPU needed."""
    details: bool = given.pop("details")
    snapshot: Path | None = given.pop("snapshot")
    check_report(report)
    if snapshot is not None:
        check_writable(snapshot)
    asked = arguments_of(given, samples)
    with show_progress() as progress:
        compute = functools.partial(
            lambda model, vram, **rest: api().plan(model, vram, **rest),
            **asked,
            progress=progress,
        )
        drawn = report or snapshot  # from more than a stored plan has
        made = compute() if drawn else _answer("plan", asked, compute)
        # All alternatives take longer than the plan.
        written = made if details or report else made.without_lazy_alternatives()
        document = json_writer().plan_json(written, samples) if save or as_json else ""
    lost = write(save, document + "\n")
    if why is not None:
        typer.echo(json_writer().why_json(made.row(why)) if as_json else made.why(why))
    elif as_json:
        typer.echo(document)
    else:
        saved_as = str(save) if save and not lost else None
        text_writer().print_plan(
            plan_with_option_names(made),
            saved_as=saved_as,
            samples=samples,
            details=details,
            work=show_progress,
        )
    lost = lost or write_snapshot(snapshot, made.dump_snapshot)
    lost = lost or write_report(report, "plan_page", made)
    exit_if_not_saved(lost)
    exit_unless_fits(fits=made.fits)


@command(
    app,
    *(CONTEXT, MODEL, CARD, SEVERAL_GPUS, RESERVED, BATCH, LENGTHS),
    *(SETTINGS_AS_THEY_ARE, ADAPTERS, LOOP, REMOTE_CODE, SAMPLES),
    example="estimate openai-community/gpt2 --gpu t4 --batch-size 8",
)
def estimate(
    *, context: typer.Context, samples: int | None, as_json: bool, **given: Any
) -> None:
    """Predict the memory of given settings; decide nothing."""
    kind, *settings = LOOP  # fields of ``Loop``
    loop = Loop(kind=given.pop(kind), **{name: given.pop(name) for name in settings})
    asked = arguments_of(given, samples)
    with show_progress() as progress:
        found, summary = _answer(
            "estimate",
            {**asked, "loop": loop},
            lambda: api().estimate_settings(
                asked.pop("model"), **asked, loop=loop, progress=progress
            ),
        )
    if as_json:
        typer.echo(json_writer().estimate_json(found, samples))
    else:
        text = text_writer().estimate_text(
            estimate_with_option_names(found),
            model=summary,
            vram=asked["vram"],
            gpu=asked["gpu"],
            samples=samples,
            then=plan_command(context),
        )
        text_writer().show(text)
    exit_unless_fits(fits=found.fits is not False)


@command(
    app,
    *(MODEL, CARDS, PRICES, only(SEVERAL_GPUS, "engine", "link")),
    *(RESERVED, BATCH, LENGTHS, SETTINGS),
    *(only(SEARCH, "objective"), METHODS, ADAPTERS, REMOTE_CODE, SAMPLES, REPORT),
    example="compare openai-community/gpt2 --gpus t4,l4,rtx-4090",
)
def compare(
    *, samples: int | None, report: Path | None, as_json: bool, **given: Any
) -> None:
    """Tell which card or method you need: the best settings on each."""
    check_report(report)
    asked = arguments_of(given, samples)
    with show_progress() as progress:
        rows, summary = _answer(
            "compare",
            dict(asked),
            lambda: api().compare(
                asked.pop("model"), asked.pop("gpus"), **asked, progress=progress
            ),
        )
    if as_json:
        typer.echo(json_writer().compare_json(rows, samples))
    else:
        writer = text_writer()
        several = any(row.gpus > 1 for row in rows)
        is_wide = asked["methods"] or samples or several
        wide = writer.WIDE if is_wide else writer.WIDTH
        shown = rows_with_option_names(rows)
        writer.show(writer.compare_text(shown, summary, samples), width=wide)
    exit_if_not_saved(write_report(report, "comparison_page", rows, summary))
    exit_unless_fits(fits=any(row.fits for row in rows))


@command(app, MODEL, BATCH, REMOTE_CODE, example="layers openai-community/gpt2")
def layers(*, as_json: bool, **given: Any) -> None:
    """List what each layer takes under each precision."""
    asked = arguments_of(given)
    with show_progress() as progress:
        rows = _answer(
            "layers",
            dict(asked),
            lambda: api().layers(asked.pop("model"), **asked, progress=progress),
        )
    if as_json:
        typer.echo(json_writer().layers_json(rows))
    else:
        text_writer().show(text_writer().layers_text(rows), width=text_writer().WIDE)


@command(
    app,
    *(PLAN_FILE, OTHER_MODEL, only(BATCH, "batch", "loss"), REAL_STEPS, REMOTE_CODE),
    example="verify plan.json",
)
def verify(*, plan_file: Path, as_json: bool, **given: Any) -> None:
    """Run real steps: predicted against measured."""
    made = _load(plan_file)  # before torch is loaded
    asked = arguments_of(given)
    with show_progress() as progress:
        check = api().verify(made, asked.pop("model"), **asked, progress=progress)
    if os.environ.get("RANK", "0") != "0":  # of torchrun: the first reports for all
        pass
    elif as_json:
        typer.echo(json_writer().verification_json(check))
    else:
        text_writer().show(
            text_writer().verification_text(check), width=text_writer().WIDE
        )
    exit_unless_fits(fits=check.out_of_memory is None)
    if not check.passed:
        raise typer.Exit(ERROR)


@command(
    app,
    *(PLAN_FILE, CHECKED_CARD, OTHER_MODEL, only(BATCH, "batch", "loss"), REMOTE_CODE),
    example="check plan.json --gpu l4",
)
def check(*, plan_file: Path, as_json: bool, **given: Any) -> None:
    """Tell whether a saved plan still fits: for CI, exit code 0 or 3."""
    made = _load(plan_file)  # before torch is loaded
    asked = arguments_of(given)
    with show_progress() as progress:
        found = api().check(made, asked.pop("model"), **asked, progress=progress)
        versions = api().library_versions()
    if as_json:
        typer.echo(json_writer().estimate_json(found))
    else:
        card = (asked["gpu"], asked["vram"])
        shown = estimate_with_option_names(found)
        text_writer().show(text_writer().check_text(made, shown, *card, versions))
    exit_unless_fits(fits=found.fits is not False)


@command(app, PLAN_FILE, SAMPLES, DETAILS, REPORT, example="show plan.json")
def show(
    *,
    plan_file: Path,
    samples: int | None,
    details: bool,
    report: Path | None,
    as_json: bool,
) -> None:
    """Print a saved plan as it was printed when it was made."""
    check_samples(samples)
    check_report(report)
    made = _load(plan_file)
    if as_json:
        typer.echo(json_writer().plan_json(made, samples))
    else:
        text_writer().print_plan(
            plan_with_option_names(made),
            saved_as=str(plan_file),
            samples=samples,
            details=details,
        )
    exit_if_not_saved(write_report(report, "plan_page", made))


@command(app, PLAN_FILE, EXPORT, example="export plan.json --to torch --save train.py")
def export(*, plan_file: Path, to: str, save: Path | None, as_json: bool) -> None:
    """Write a plan as another library's settings, or as a program that trains."""
    if to not in EXPORTS:
        raise InputError(
            f"{to!r} is not an export. Use one of: {', '.join(EXPORTS)}; "
            "for example --to torch."
        )
    made = _load(plan_file)
    with show_progress() as progress:  # what libraries print is no result
        module = import_or_exit(EXPORTS[to])
        if to in KINDS or made.recipe.longest_batch_first:
            kind = to if to in KINDS else "run"
            made = api().plan_in_loop(made, kind, progress)
        text = module.export_text(made, str(plan_file))
    lost = write(save, text)
    if as_json:
        typer.echo(json_writer().export_json(to, text))
    elif save is None or lost:
        typer.echo(text, nl=False)
    exit_if_not_saved(lost)


@command(app, example="gpus")
def gpus(*, as_json: bool) -> None:
    """List the cards that --gpu knows."""
    from budgetfit.gpus.table import all_gpus

    if as_json:
        typer.echo(json_writer().gpus_json(all_gpus()))
    else:
        text = text_writer().gpus_text(all_gpus())
        text_writer().show(text, width=text_writer().WIDE)


@command(app, DOCTORED_CARD, example="doctor --gpu rtx-4090")
def doctor(*, gpu: str | None, as_json: bool) -> None:
    """Check torch, driver, card and libraries, and say what to do."""
    with show_progress():
        module = importlib.import_module("budgetfit.doctor.checks")
        findings = module.check_installation(gpu)
    if as_json:
        typer.echo(json_writer().findings_json(findings))
    else:
        text_writer().show(text_writer().doctor_text(findings))
    if any(finding.verdict == "problem" for finding in findings):
        raise typer.Exit(ERROR)


command(app, OOM_FILE, example="explain oom.txt")(explain)


def _answer(command: str, asked: dict[str, Any], compute: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Return what ``compute`` returns, from disk where nothing changed."""
    from budgetfit.cli.stored_answers import ask

    return ask(command, asked, compute)


def _load(path: Path) -> "Plan":
    from budgetfit.core.plan import Plan

    return Plan.load(path)
