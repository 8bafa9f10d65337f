"""The ``budgetfit`` typer app: parse options, call the api, print its reports.

Output streams and exit codes are in ``cli.output``. Modules that need torch are
imported inside the commands, so that ``--help`` and ``gpus`` start fast.
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from budgetfit.cli import cache, options
from budgetfit.cli.compare import compare
from budgetfit.cli.doctor import doctor
from budgetfit.cli.early_checks import check_before_torch_import
from budgetfit.cli.explain import explain
from budgetfit.cli.output import (
    ERROR,
    INTERRUPTED,
    api,
    exit_if_not_saved,
    exit_unless_fits,
    ignore_odd_width,
    import_or_exit,
    json_writer,
    report_errors,
    show_progress,
    text_writer,
)
from budgetfit.cli.parsing import (
    one_or_list,
    parse_batch_dims,
    policy_or_blocks,
    read_lengths,
)
from budgetfit.cli.quiet_libraries import quiet_libraries
from budgetfit.cli.save import write
from budgetfit.cli.show import show
from budgetfit.cli.suggested_command import plan_command
from budgetfit.cli.tables import gpus, layers
from budgetfit.cli.unsupported_options import Command, Group
from budgetfit.core.validation import check_samples
from budgetfit.errors import InputError

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
        # Characters missing in the terminal's encoding must not raise.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    ignore_odd_width()
    try:
        with quiet_libraries():
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


@app.command(
    cls=Command,
    epilog="Example: budgetfit plan HuggingFaceTB/SmolLM2-1.7B --gpu rtx-4090",
)
def plan(  # noqa: PLR0913 - the arguments of budgetfit.plan
    model: options.Model,
    *,
    vram: options.Vram = None,
    gpu: options.Gpu = None,
    headroom: options.Headroom = None,
    host_ram: options.HostRam = None,
    max_length: options.MaxLength = None,
    image_size: options.ImageSize = None,
    text_only: options.TextOnly = False,
    batch: options.Batch = None,
    batch_dims: options.BatchDims = None,
    loss: options.Loss = None,
    lengths: options.Lengths = None,
    batch_size: options.BatchSize = None,
    effective_batch_size: options.EffectiveBatchSize = None,
    precision: options.Precision = "auto",
    optimizer: options.Optimizer = "adamw_torch_fused",
    checkpointing: options.Checkpointing = "auto",
    objective: options.Objective = "throughput",
    optimizer_in_backward: options.OptimizerInBackward = False,
    method: options.Method = None,
    lora_r: options.LoraR = 16,
    lora_alpha: options.LoraAlpha = 32,
    lora_dropout: options.LoraDropout = 0.0,
    target_modules: options.TargetModules = "all-linear",
    quantization: options.Quantization = None,
    double_quantization: options.DoubleQuantization = True,
    prepare_for_kbit: options.PrepareForKbit = True,
    trust_remote_code: options.TrustRemoteCode = False,
    samples: options.Samples = None,
    why: options.Why = None,
    save: options.SavePlan = None,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """Find the fastest training settings that fit; no GPU needed."""
    with report_errors(as_json=as_json, traceback=traceback, vram=vram, save=save):
        check_before_torch_import(
            model,
            gpus=[gpu],
            vram=vram,
            headroom=headroom,
            precision=one_or_list(precision),
            objective=objective,
            batch_size=batch_size,
            effective_batch_size=effective_batch_size,
        )
        check_samples(samples)
        with show_progress() as progress:
            made = api().plan(
                model,
                vram,
                gpu=gpu,
                max_length=max_length,
                image_size=image_size,
                text_only=text_only,
                batch=batch,
                batch_dims=parse_batch_dims(batch_dims),
                loss=loss,
                lengths=read_lengths(lengths),
                precision=one_or_list(precision),
                optimizer=optimizer,
                batch_size=batch_size,
                effective_batch_size=effective_batch_size,
                checkpointing=policy_or_blocks(checkpointing),
                objective=objective,
                headroom=headroom,
                host_ram=host_ram,
                optimizer_in_backward=optimizer_in_backward,
                method=method,
                lora_r=lora_r,
                lora_alpha=lora_alpha,
                lora_dropout=lora_dropout,
                target_modules=one_or_list(target_modules),
                quantization=quantization,
                double_quantization=double_quantization,
                prepare_for_kbit=prepare_for_kbit,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
            document = json_writer().plan_json(made, samples) if save or as_json else ""
        lost = write(save, document + "\n")
        if why is not None:
            typer.echo(
                json_writer().why_json(made.row(why)) if as_json else made.why(why)
            )
        elif as_json:
            typer.echo(document)
        else:
            saved_as = str(save) if save and not lost else None
            text_writer().print_plan(
                made, saved_as=saved_as, samples=samples, work=show_progress
            )
        exit_if_not_saved(lost)
        exit_unless_fits(fits=made.fits)


@app.command(
    cls=Command,
    epilog="Example: budgetfit estimate openai-community/gpt2 --gpu t4 --batch-size 8",
)
def estimate(  # noqa: PLR0913 - the settings that are estimated
    context: typer.Context,
    model: options.Model,
    *,
    vram: options.Vram = None,
    gpu: options.Gpu = None,
    headroom: options.Headroom = None,
    host_ram: options.HostRam = None,
    max_length: options.MaxLength = None,
    image_size: options.ImageSize = None,
    text_only: options.TextOnly = False,
    batch: options.Batch = None,
    batch_dims: options.BatchDims = None,
    loss: options.Loss = None,
    lengths: options.Lengths = None,
    batch_size: options.BatchSize = None,
    effective_batch_size: options.EffectiveBatchSize = None,
    precision: options.OnePrecision = "as-is",
    optimizer: options.Optimizer = "adamw_torch_fused",
    checkpointing: options.Checkpointing = "as-is",
    method: options.Method = None,
    lora_r: options.LoraR = 16,
    lora_alpha: options.LoraAlpha = 32,
    lora_dropout: options.LoraDropout = 0.0,
    target_modules: options.TargetModules = "all-linear",
    quantization: options.Quantization = None,
    double_quantization: options.DoubleQuantization = True,
    prepare_for_kbit: options.PrepareForKbit = True,
    trust_remote_code: options.TrustRemoteCode = False,
    samples: options.Samples = None,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """Predict the memory of given settings; decide nothing."""
    with report_errors(as_json=as_json, traceback=traceback):
        check_before_torch_import(
            model,
            gpus=[gpu],
            vram=vram,
            headroom=headroom,
            precision=precision,
            batch_size=batch_size,
            effective_batch_size=effective_batch_size,
        )
        check_samples(samples)
        with show_progress() as progress:
            found, summary = api().estimate_settings(
                model,
                vram=vram,
                gpu=gpu,
                headroom=headroom,
                host_ram=host_ram,
                max_length=max_length,
                image_size=image_size,
                text_only=text_only,
                batch=batch,
                batch_dims=parse_batch_dims(batch_dims),
                loss=loss,
                lengths=read_lengths(lengths),
                batch_size=batch_size,
                effective_batch_size=effective_batch_size,
                precision=precision,
                optimizer=optimizer,
                checkpointing=policy_or_blocks(checkpointing),
                method=method,
                lora_r=lora_r,
                lora_alpha=lora_alpha,
                lora_dropout=lora_dropout,
                target_modules=one_or_list(target_modules),
                quantization=quantization,
                double_quantization=double_quantization,
                prepare_for_kbit=prepare_for_kbit,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        if as_json:
            typer.echo(json_writer().estimate_json(found, samples))
        else:
            text = text_writer().estimate_text(
                found,
                model=summary,
                vram=vram,
                gpu=gpu,
                samples=samples,
                then=plan_command(context),
            )
            text_writer().show(text)
        exit_unless_fits(fits=found.fits is not False)


app.command(
    cls=Command,
    epilog="Example: budgetfit compare openai-community/gpt2 --gpus t4,l4,rtx-4090",
)(compare)


app.command(cls=Command, epilog="Example: budgetfit layers openai-community/gpt2")(
    layers
)


@app.command(cls=Command, epilog="Example: budgetfit verify plan.json")
def verify(  # noqa: PLR0913 - what a user may choose
    plan_file: options.PlanFile,
    *,
    model: options.OtherModel = None,
    batch: options.Batch = None,
    loss: options.Loss = None,
    steps: options.Steps = 3,
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """Run real steps: predicted against measured."""
    with report_errors(as_json=as_json, traceback=traceback):
        made = _load(plan_file)  # before torch is loaded
        check_before_torch_import(model)
        with show_progress() as progress:
            check = api().verify(
                made,
                model,
                batch=batch,
                loss=loss,
                steps=steps,
                device=device,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        if as_json:
            typer.echo(json_writer().verification_json(check))
        else:
            text_writer().show(
                text_writer().verification_text(check), width=text_writer().WIDE
            )
        exit_unless_fits(fits=check.out_of_memory is None)
        if not check.passed:
            raise typer.Exit(ERROR)


app.command(cls=Command, epilog="Example: budgetfit show plan.json")(show)


@app.command(
    cls=Command,
    epilog="Example: budgetfit export plan.json --to torch --save train.py",
)
def export(
    plan_file: options.PlanFile,
    *,
    to: options.Target,
    save: options.SaveText = None,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """Write a plan as another library's configuration."""
    with report_errors(as_json=as_json, traceback=traceback, save=save):
        if to not in EXPORTS:
            raise InputError(
                f"{to!r} is not an export. Use one of: {', '.join(EXPORTS)}; "
                "for example --to torch."
            )
        made = _load(plan_file)
        with (
            show_progress()
        ):  # what libraries print while imported does not belong on stdout
            module = import_or_exit(EXPORTS[to])
            text = module.export_text(made, str(plan_file))
        lost = write(save, text)
        if as_json:
            typer.echo(json_writer().export_json(to, text))
        elif save is None or lost:
            typer.echo(text, nl=False)
        exit_if_not_saved(lost)


app.command(cls=Command, epilog="Example: budgetfit gpus")(gpus)
app.command(cls=Command, epilog="Example: budgetfit doctor --gpu rtx-4090")(doctor)
app.command(cls=Command, epilog="Example: budgetfit explain oom.txt")(explain)


def _load(path: Path) -> Any:  # noqa: ANN401 - a Plan; its module is not imported yet
    from budgetfit.core.plan import Plan  # noqa: PLC0415 - keeps --help fast

    return Plan.load(path)
