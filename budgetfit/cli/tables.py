"""``budgetfit layers`` and ``budgetfit gpus``: the layer table and the GPU table."""

import typer

from budgetfit.cli import options
from budgetfit.cli.early_checks import check_before_torch_import
from budgetfit.cli.output import (
    api,
    json_writer,
    report_errors,
    show_progress,
    text_writer,
)
from budgetfit.cli.parsing import parse_batch_dims


def layers(  # noqa: PLR0913 - what a batch is made of
    model: options.Model,
    *,
    max_length: options.MaxLength = None,
    image_size: options.ImageSize = None,
    text_only: options.TextOnly = False,
    batch: options.Batch = None,
    batch_dims: options.BatchDims = None,
    loss: options.Loss = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """List what each layer takes under each precision."""
    with report_errors(as_json=as_json, traceback=traceback):
        check_before_torch_import(model)
        with show_progress() as progress:
            rows = api().layers(
                model,
                max_length=max_length,
                image_size=image_size,
                text_only=text_only,
                batch=batch,
                batch_dims=parse_batch_dims(batch_dims),
                loss=loss,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        if as_json:
            typer.echo(json_writer().layers_json(rows))
        else:
            text_writer().show(
                text_writer().layers_text(rows), width=text_writer().WIDE
            )


def gpus(
    *, as_json: options.AsJson = False, traceback: options.Traceback = False
) -> None:
    """List the cards that --gpu knows."""
    with report_errors(as_json=as_json, traceback=traceback):
        from budgetfit.gpus.table import all_gpus  # noqa: PLC0415 - keeps --help fast

        if as_json:
            typer.echo(json_writer().gpus_json(all_gpus()))
        else:
            text_writer().show(
                text_writer().gpus_text(all_gpus()), width=text_writer().WIDE
            )
